"""The scripted proposer: the true continuation, planted on a random path of a random tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engines import Oracle, random_tree
from schedules import VOCAB, Schedule

from vllm_medusa.tree.topology import Tree

if TYPE_CHECKING:
    from hostile import World


class Script(Oracle):
    """Plants each request's true continuation; what is drafted depends on the request and its progress alone."""

    def __init__(self, world: World, schedule: Schedule) -> None:
        """Draft for `schedule`."""
        super().__init__(world.trees, {}, lambda rng: random_tree(rng, 1), vocab=VOCAB, misses=schedule.misses)
        self.world, self.schedule = world, schedule
        self.names: list[str] = []

    def __call__(self, rows: list[int], hidden: torch.Tensor, roots: torch.Tensor) -> Any:
        """Stand in for the runner's `_draft`."""
        runner = self.engine.runner
        self.names = [runner.input_batch.req_ids[row] for row in rows]
        turn = iter(self.names)
        self.world.check_hidden(self.names, hidden, roots)

        def shape(_: np.random.Generator) -> Any:
            name = next(turn)
            self.rng = self._rng_for(name)
            if self.rng.random() < 0.3:
                return random_tree(self.rng, self.schedule.nodes, self.schedule.depth)
            return random_tree(self.rng, int(self.rng.integers(0, self.schedule.nodes + 1)), self.schedule.depth)

        self.shape = shape
        return super().__call__(rows, hidden, roots)

    def _answer(self, request: Any) -> Sequence[int]:
        self.rng = self._rng_for(request.req_id, 1)
        return self.world.running[request.req_id].longer

    def plant(self, tree: Tree, truth: Sequence[int]) -> list[int]:
        """Half of the time along the deepest path, so that long acceptances are common."""
        if not tree.num_nodes or self.rng.random() < 0.5:
            return super().plant(tree, truth)
        tokens = [int(token) for token in self.rng.integers(2, self.vocab - 1, tree.num_nodes)]
        if self.rng.random() < self.misses:
            return tokens
        deepest = max(range(tree.num_rows), key=lambda row: (tree.depths[row], row))
        for row, token in zip(tree.path(deepest), truth, strict=False):
            tokens[row - 1] = token
        return tokens

    def _rng_for(self, name: str, use: int = 0) -> np.random.Generator:
        emitted = len(self.engine.runner.requests[name].output_token_ids)
        return np.random.default_rng([self.schedule.seed, self.world.running[name].ask.number, emitted, use])
