"""The scripted proposer: the true continuation, planted on a random path of a random tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engines import Oracle, random_tree
from schedules import VOCAB, Schedule

from vllm_medusa.heads.model import Candidates
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
        self.look_at(rows, hidden, roots)
        if self.schedule.source != "script":
            return self.by_the_product(rows, hidden, roots)
        turn = iter(self.names)

        def shape(_: np.random.Generator) -> Any:
            name = next(turn)
            self.rng = self._rng_for(name)
            if self.rng.random() < 0.3:
                return random_tree(self.rng, self.schedule.nodes, self.schedule.depth)
            return random_tree(self.rng, int(self.rng.integers(0, self.schedule.nodes + 1)), self.schedule.depth)

        self.shape = shape
        draft = super().__call__(rows, hidden, roots)
        if self.schedule.adaptive:  # promises, by which nodes are shared
            for name, reach in zip(self.names, draft.reach, strict=True):
                reach[:] = -np.sort(-self._rng_for(name, 2).random(len(reach)))
        return draft

    def look_at(self, rows: list[int], hidden: torch.Tensor, roots: torch.Tensor) -> None:
        """Whose drafts are asked for, from which rows."""
        self.names = [self.engine.runner.input_batch.req_ids[row] for row in rows]
        if len(hidden):  # else the heads are not worth asking
            self.world.check_hidden(self.names, hidden, roots)
        self.world.totals.unasked += not len(hidden)

    def by_the_product(self, rows: list[int], hidden: torch.Tensor, roots: torch.Tensor) -> Any:
        """Trees as the product grows them, from candidates that are planted if the schedule says so."""
        runner = self.engine.runner
        heads = runner.drafter.heads
        if self.schedule.source == "guesses":
            heads.candidates = self.guesses
        try:
            draft = runner.drafting.draft(rows, hidden, roots)
        finally:
            heads.__dict__.pop("candidates", None)
        offered = np.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
        self.world.totals.text_nodes += int(((draft.ranks == runner.drafter.top_k) & offered).sum())
        self.world.totals.drawn_drafts += 0 if draft.drawn is None else int(draft.drawn.which.sum())
        return draft

    def guesses(self, hidden: torch.Tensor, roots: torch.Tensor, k: int) -> Candidates:
        """Stand in for the heads' `candidates`: the true continuation among others, at any rank."""
        heads = self.engine.runner.drafter.heads.config.num_heads
        tokens = np.zeros((len(self.names), heads, k), dtype=np.int64)
        chances = np.zeros(tokens.shape, dtype=np.float32)
        for row, name in enumerate(self.names):
            rng = self._rng_for(name)
            request = self.engine.runner.requests[name]
            truth = self._answer(request)[len(request.output_token_ids) :]
            for head in range(heads):
                tokens[row, head] = rng.permutation(np.arange(2, self.vocab - 1))[:k]
                chances[row, head] = -np.sort(-rng.dirichlet(np.full(k, 0.4)))
                if head < len(truth) and rng.random() >= self.misses and truth[head] not in tokens[row, head]:
                    tokens[row, head, rng.integers(0, min(k, 4))] = truth[head]
        return Candidates(torch.from_numpy(tokens), torch.from_numpy(chances))

    def _answer(self, request: Any) -> Sequence[int]:
        self.rng = self._rng_for(request.req_id, 1)
        return self.world.entry(request.req_id).longer

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
        return np.random.default_rng([self.schedule.seed, self.world.entry(name).ask.number, emitted, use])
