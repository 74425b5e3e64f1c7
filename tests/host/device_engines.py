"""Engines on Model Runner V2, in the interpreter's process, and drafts that tests script there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import interpreter
import numpy as np
import torch
from engines import Engine, random_tree, start

from vllm_medusa.tree.topology import Tree

NODES = 8
AS_SERVED = {"max_model_len": 512, "block_size": 32, "disable_log_stats": False}  # statistics as a server keeps them
PROMISE = 0.5  # reach of each node that an oracle drafts
_STARTED: dict[str, Engine] = {}


def engine(
    model: Path,
    heads: Path | None = None,
    *,
    is_async: bool = False,
    attention: str = "CPU_ATTN",
    graphs: Sequence[int] = (),
    **options: Any,
) -> Engine:
    """The engine with these options, started when first asked for.

    Args:
        model, heads: folders; without heads: plain.
        is_async: steps are scheduled before the last one's outcome is known.
        attention: which the host has.
        graphs: tokens of the steps that are recorded.
        options: of the engine.
    """
    key = repr((model, heads, is_async, attention, graphs, sorted(options.items())))
    if key not in _STARTED:
        interpreter.choose(is_async=is_async, attention=attention)
        if heads is not None:
            medusa = {"num_speculative_tokens": NODES, "adaptive": False, **options.pop("medusa", {})}
            options["medusa"] = medusa
        _STARTED[key] = started = start(model, heads, **{**AS_SERVED, **options})
        assert started.llm.llm_engine.vllm_config.scheduler_config.async_scheduling == is_async
        if graphs:
            interpreter.record_graphs(started.runner, list(graphs))
    return _STARTED[key]


class DeviceOracle:
    """Drafts that hold the true continuation of each request, hidden on a path of its tree; such nodes have rank 1.

    Attributes:
        drafted, checked: trees; hidden rows looked at; roots: those of them that were a tree's root.
    """

    def __init__(
        self, engine: Engine, texts: Sequence[Sequence[int]], shape: Callable[[np.random.Generator], Tree], vocab: int
    ) -> None:
        """`texts`: prompts with their answers; `shape`: a tree for each draft."""
        self.engine, self.texts, self.shape, self.vocab = engine, [list(text) for text in texts], shape, vocab
        self.rng = np.random.default_rng(0)
        self.misses = 0.2
        self.drafted = self.checked = self.below_root = 0

    def __call__(self, slots: Any, hidden: Any, roots: Any, *_: Any) -> Any:
        """Stand in for the speculator's `_draft`."""
        from vllm_medusa.tree.tensors import TensorTrees

        states, runner = self.engine.runner.req_states, self.engine.runner
        said = runner.model.compute_logits(hidden).argmax(dim=-1)
        walk = runner.trees.step.walk if runner.trees.step is not None else None
        shape = (len(slots), runner.trees.num_nodes)
        tokens, parents, ranks = np.zeros(shape, dtype=np.int64), np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        for row, slot in enumerate(slots.tolist()):
            known = states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()
            if int(states.num_computed_tokens.gpu[slot]) + 1 != len(known):
                continue  # a prompt that is not computed to its end, or is computed again after preemption
            if self.greedy:
                assert int(said[row]) == int(roots[row]) == known[-1], "not the hidden row of the last token"
                self.checked += 1
                self.below_root += walk is not None and int(walk.lengths[row]) > 1
            text = next((text for text in self.texts if text[: len(known)] == known[: len(text)]), None)
            assert text is not None or not self.must_know, "a request says what no text says"
            tree = self.shape(self.rng)
            n = tree.num_nodes
            drafted = self.rng.integers(2, self.vocab - 1, n)
            if n and text is not None and self.rng.random() >= self.misses:
                path = tree.path(int(self.rng.integers(1, tree.num_rows)))
                for node, token in zip(path, text[len(known) :], strict=False):
                    drafted[node - 1], ranks[row, node - 1] = token, 1
            tokens[row, :n], parents[row, :n] = drafted, tree.parents
            self.drafted += 1
        tokens, parents = torch.from_numpy(tokens), torch.from_numpy(parents)
        is_node = parents >= 0
        return TensorTrees(tokens, parents, torch.from_numpy(ranks).where(is_node, -1), PROMISE * is_node)

    greedy = False  # hidden rows are checked
    must_know = True


@contextmanager
def drafting(oracle: DeviceOracle) -> Iterator[DeviceOracle]:
    """Let an oracle draft."""
    runner = oracle.engine.runner
    runner.speculator._draft = oracle
    runner.trees.max_depth, before = NODES, runner.trees.max_depth
    try:
        yield oracle
    finally:
        del runner.speculator._draft
        runner.trees.max_depth = before


def any_tree(rng: np.random.Generator) -> Tree:
    """Another topology for each request and step."""
    return random_tree(rng, int(rng.integers(1, NODES + 1)))


class Steps:
    """Counts what an engine emits a request and step."""

    def __init__(self, engine: Engine) -> None:
        """Listen to the walks of `engine`."""
        self.tokens = self.walks = 0
        sampler = engine.runner.rejection_sampler
        walk = type(sampler).__call__

        def call(*args: Any) -> Any:
            output = walk(sampler, *args)
            self.walks += int((output.num_sampled > 0).sum())
            self.tokens += int(output.num_sampled.sum())
            return output

        engine.runner.rejection_sampler = call
        self._undo = lambda: setattr(engine.runner, "rejection_sampler", sampler)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo()

    @property
    def length(self) -> float:
        """Mean tokens a request and step."""
        return self.tokens / max(self.walks, 1)
