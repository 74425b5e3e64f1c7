"""What tests do in the workers of an engine on several ranks: methods that vLLM mixes into its worker class.

`LLM(worker_extension_cls="on_each_rank.OnEachRank")`, then `llm.collective_rpc("log_steps")`.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from engines import Engine, Oracle, random_tree


class OnEachRank:
    """Part of the worker of each rank."""

    model_runner: Any
    rank: int

    def log_steps(self) -> None:
        """From now on, note what each step of this rank checked, emitted and drafted."""
        runner = self.model_runner
        self.steps: list[Any] = []
        next_drafts = runner.drafting.next_drafts

        def logged(emitted: list[list[int]], *args: Any) -> list[list[int]]:
            drafts: list[list[int]] = next_drafts(emitted, *args)
            checked = [runner.trees.tokens.tolist(), runner.trees.parents.tolist()]
            self.steps.append([checked, [[int(token) for token in tokens] for tokens in emitted], drafts])
            return drafts

        runner.drafting.next_drafts = logged

    def taken_steps(self) -> list[Any]:
        """What was noted since the last time."""
        steps, self.steps = self.steps, []
        return steps

    def draft_what_is_true(self, prompts: list[list[int]], answers: list[list[int]], nodes: int, vocab: int) -> None:
        """Random trees with the true continuation on one path (see `Oracle`)."""
        truth = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        oracle = Oracle(Engine(None, self.model_runner), truth, lambda rng: random_tree(rng, nodes), vocab=vocab)
        self.model_runner._draft = oracle

    def draft_by_heads(self) -> None:
        """The heads' trees again."""
        del self.model_runner._draft

    def skew_clock(self) -> None:
        """Ranks other than the first measure nonsense from now on: up to a day for anything."""
        from vllm_medusa.host.v1 import drafting, runner

        if self.rank > 0:
            rng = np.random.default_rng(self.rank)
            awry = SimpleNamespace(perf_counter=lambda: 86400 * float(rng.random()) ** 8, monotonic=time.monotonic)
            drafting.time = runner.time = awry
