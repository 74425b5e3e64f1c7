"""What tests of Model Runner V1 with a GPU's attention run in the interpreter's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import interpreter
import numpy as np
from engines import Engine, Oracle, random_prompts, random_tree, start

NODES = 8
LIMITS = {"max_model_len": 96, "block_size": 32}
PIECES = {"max_num_batched_tokens": 40}  # plain vLLM ends when it computes a seeded prompt in pieces on a CPU
_STARTED: dict[bool, Engine] = {}


def engine(model: Path, heads: Path | None) -> Engine:
    """Plain with the attention of CPUs, or trees with that of GPUs, whose prompts come in pieces."""
    if (heads is not None) not in _STARTED:
        interpreter.choose(is_async=False, attention="CPU_ATTN" if heads is None else "TRITON_ATTN")
        medusa = {"medusa": {"num_speculative_tokens": NODES, "adaptive": False}, **PIECES} if heads else {}
        _STARTED[heads is not None] = start(model, heads, **LIMITS, **medusa)
    return _STARTED[heads is not None]


def compare(
    model: Path, heads: Path, lengths: Sequence[int], params: Sequence[dict[str, Any]], fault: str = ""
) -> dict[str, Any]:
    """Ask both the same, drafts holding the true continuation more often than not.

    Args:
        model, heads: folders.
        lengths: of random prompts.
        params: of each, as `SamplingParams` takes them.
        fault: "no_commit": accepted keys and values stay where they were checked.
    """
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(3), lengths)
    asked = [SamplingParams(ignore_eos=True, **given) for given in params]
    plain = engine(model, None).answer(prompts, asked)
    trees = engine(model, heads)
    answers = {tuple(prompt): list(told.token_ids) for prompt, told in zip(prompts, plain, strict=True)}
    oracle = Oracle(trees, answers, lambda rng: random_tree(rng, int(rng.integers(1, NODES + 1))))
    runner = trees.runner
    runner.medusa_report(reset=True)
    runner._draft = oracle
    if fault == "no_commit":
        runner._commit = lambda *_: None
    try:
        said = trees.answer(prompts, asked)
    finally:
        del runner._draft
        vars(runner).pop("_commit", None)
    report = runner.medusa_report()
    return {
        "differences": [
            f"{list(b.token_ids)} in place of {list(a.token_ids)}"
            for a, b in zip(plain, said, strict=True)
            if list(a.token_ids) != list(b.token_ids)
        ],
        "length": report["mean_accepted_length"],
        "kernel": report["kernel"],
    }


def looks_at_kernels(model: Path, heads: Path) -> None:
    """As before a GPU serves."""
    engine(model, heads).runner.warm_up_trees()
