"""What tests do inside the workers of an engine on several ranks: by `llm.collective_rpc`, on every rank."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import Engine, Oracle, random_tree

from vllm_medusa.host.v1 import drafting, runner


def log_steps(worker: Any) -> None:
    """From now on, note what every step of this rank walked and drafted."""
    ours = worker.model_runner
    ours.steps = []
    plain = type(ours.drafting).next_drafts

    def next_drafts(emitted: list[list[int]], *args: Any) -> list[list[int]]:
        drafts = plain(ours.drafting, emitted, *args)
        shapes = [entry.parents.tolist() for entry in ours.book.drafts.values()]
        ours.steps.append(([list(map(int, tokens)) for tokens in emitted], [list(map(int, d)) for d in drafts], shapes))
        return drafts

    ours.drafting.next_drafts = next_drafts


def taken_steps(worker: Any) -> list[Any]:
    """What was noted since the last time."""
    steps, worker.model_runner.steps = worker.model_runner.steps, []
    return list(steps)


def draft_what_is_true(worker: Any, prompts: list[list[int]], answers: list[list[int]], nodes: int, vocab: int) -> None:
    """Random trees that hold the true continuation on one path (`Oracle`); none of it: the heads' own again."""
    ours = worker.model_runner
    ours.__dict__.pop("_draft", None)
    if prompts:
        truth = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        shape = lambda rng: random_tree(rng, nodes)  # noqa: E731
        ours._draft = Oracle(Engine(None, ours), truth, shape, np.random.default_rng(5), vocab=vocab)


def skew_clock(worker: Any) -> None:
    """The second rank's clock tells nonsense: seconds from nothing to a day."""
    if worker.rank == 0:
        return
    rng = np.random.default_rng(0)
    awry = SimpleNamespace(perf_counter=lambda: float(rng.random() ** 8 * 86400), monotonic=time.monotonic)
    drafting.time = runner.time = awry


def figures(worker: Any) -> dict[str, Any]:
    """The rank's own report."""
    return dict(worker.medusa_report(reset=True))
