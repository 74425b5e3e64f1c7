"""Engines for the host tests: in-process LLMs with their runner within reach, and drafts that tests script.

Drafts are scripted where a test needs long and awkward acceptances: `Oracle` knows each request's true continuation
and plants it on a path of a random tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_medusa.proposer import TreeDraft
from vllm_medusa.tree.topology import Tree

# An in-process engine that is collected takes the process groups of all the others with it.
_ALIVE: list[Any] = []
VOCAB = 160
MAX_LEN = 512
SPEAKING: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 32, "skip_tokenizer_init": False}


@dataclass
class Engine:
    """An in-process LLM with its runner within reach."""

    llm: Any
    runner: Any

    def answer(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """Completions (the first of each request), in the order of the prompts."""
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def tokens(self, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
        """Emitted token ids."""
        return [list(completion.token_ids) for completion in self.answer(prompts, params)]

    def draft_with(self, tree: Tree | str, nodes: int | None = None) -> None:
        """Draft a fixed tree, or "dynamic" ones of `nodes` nodes, from now on."""
        drafter = self.runner.drafter
        if isinstance(tree, Tree):
            drafter.fixed_tree = tree
        else:
            drafter.fixed_tree = None
            drafter.settings = drafter.settings.model_copy(update={"num_speculative_tokens": nodes})

    @property
    def free_blocks(self) -> int:
        """Unused KV blocks."""
        core = self.llm.llm_engine.engine_core.engine_core
        return int(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def start(model: Path | str, heads: Path | str | None = None, **options: Any) -> Engine:
    """Start an in-process engine; `medusa={...}` adds settings beside the heads.

    Our product multiplies in all linear layers, whether it is the quicker one here or not, so it is compared too.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    medusa = options.pop("medusa", {})
    if heads is not None:
        options["speculative_config"] = {"method": "medusa", "model": str(heads), "linear_product": "medusa", **medusa}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "num_gpu_blocks_override": 320,  # a small cache: tests copy and compare it whole
        "seed": 0,
        "max_logprobs": -1,
    }
    llm = LLM(model=str(model), **{**settings, **options})
    _ALIVE.append(llm)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = getattr(executor, "driver_worker", None)  # several ranks have processes of their own
    return Engine(llm, worker and worker.worker.model_runner)


@dataclass
class Oracle:
    """Drafts that hold the true continuation on one path of each tree.

    Attributes:
        engine: whose runner drafts by this oracle.
        answers: the true continuation by prompt, or by (prompt, number of the copy).
        shape: gives a tree for each draft.
        rng: chooses paths and junk.
        misses: how often a step plants nothing.
    """

    engine: Engine
    answers: dict[Any, list[int]]
    shape: Callable[[np.random.Generator], Tree]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    misses: float = 0.2
    vocab: int = VOCAB

    def __call__(self, rows: list[int], hidden: torch.Tensor, roots: torch.Tensor) -> TreeDraft:
        """Stand in for the runner's `_draft`."""
        trees = [self.shape(self.rng) for _ in rows]
        width = max(tree.num_nodes for tree in trees)
        tokens = np.full((len(rows), width), -1, dtype=np.int64)
        parents, ranks = tokens.copy(), np.zeros_like(tokens)
        for place, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            request = self.engine.runner.requests[self.engine.runner.input_batch.req_ids[row]]
            truth = self._answer(request)[len(request.output_token_ids) :]
            n = tree.num_nodes
            tokens[place, :n] = self.plant(tree, truth)
            parents[place, :n], ranks[place, :n] = tree.parents, tree.ranks
        sizes = np.array([tree.num_nodes for tree in trees])
        return TreeDraft(tokens, parents, ranks, np.ones(tokens.shape, dtype=np.float32), sizes)

    def _answer(self, request: Any) -> Sequence[int]:
        """By prompt, or by prompt and number of the copy where a request asks for several (n > 1)."""
        prompt = tuple(request.prompt_token_ids)
        if prompt in self.answers:
            return self.answers[prompt]
        copy = re.match(r"(\d+)_", request.req_id)
        return self.answers[prompt, int(copy[1]) if copy else 0]

    def plant(self, tree: Tree, truth: Sequence[int]) -> list[int]:
        """Tokens for the nodes: junk, except along one path to a random leaf."""
        tokens = [int(token) for token in self.rng.integers(2, self.vocab - 1, tree.num_nodes)]
        if tree.num_nodes and self.rng.random() >= self.misses:
            leaf = int(self.rng.integers(1, tree.num_rows))
            for row, token in zip(tree.path(leaf), truth, strict=False):
                tokens[row - 1] = token
        return tokens


def random_tree(rng: np.random.Generator, nodes: int, max_depth: int = 6) -> Tree:
    """A random ancestor-closed tree of `nodes` nodes."""
    parents: list[int] = []
    depths = [0]
    for node in range(nodes):
        open_rows = [row for row in range(node + 1) if depths[row] < max_depth]
        # A bias towards recent rows makes deep trees as likely as bushes.
        parent = open_rows[int(len(open_rows) * rng.random() ** rng.choice([0.4, 1.0]))]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return Tree(tuple(parents))


def random_prompts(rng: np.random.Generator, lengths: Sequence[int], vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of the given lengths, all different."""
    return [rng.integers(2, vocab - 1, length).tolist() for length in lengths]
