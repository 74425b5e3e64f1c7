"""What serving on Model Runner V2 teaches: what steps cost, how far trees are reached, how many nodes therefore pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_medusa.cost import StepCost
from vllm_medusa.host.metrics.figures import Learnt
from vllm_medusa.tries import Tries
from vllm_medusa.trust import Trust
from vllm_medusa.widths import MeasuredReach, best_widths, width_grid, width_rates

TRY_STEPS = 4  # steps that a try lasts


class StepSize(NamedTuple):
    """How large a step was: tokens, requests, and the keys that roots and nodes read (see `StepCost.observe`)."""

    tokens: int
    requests: int
    keys: float = 0.0
    node_keys: float = 0.0


class Learning:
    """Costs and reach as known now, from plain values that have come from the device.

    Attributes:
        cost: seconds of a step by its tokens, without the heads.
        heads_cost: seconds of drafting, by requests.
        trust: accepted nodes over what drafts promised.
        reach: of each node of a tree; None: the number of nodes is not ours to choose.
        widths: nodes by number of requests, as chosen last.

    All requests of a step draft as many nodes here, so there is one trust. More nodes than look best are tried as on
    Model Runner V1, within what `Tries` allows.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.cost, self.heads_cost, self.trust = StepCost(), StepCost(), Trust()
        self.reach: MeasuredReach | None = None
        self.widths: list[int] | None = None
        self.tries = Tries(most=4 * TRY_STEPS)
        self._grid: list[int] = []
        self._most = 0
        self._last = StepSize(1, 1)
        self._best: list[int] | None = None  # widths without a try
        self._trying = 0  # steps that a try still lasts

    def choose_from(self, reach: Sequence[float], num_nodes: int, most: int) -> None:
        """Costs have been measured: choose from now on.

        Args:
            reach: of the first nodes, as calibrated.
            num_nodes: N, most nodes of a tree.
            most: requests.
        """
        self.reach = MeasuredReach([*reach, *[0.0] * (num_nodes - len(reach))])
        self._grid, self._most = width_grid(num_nodes), most
        self.choose()

    def choose(self) -> None:
        """Choose `widths` anew; where that can be afforded, the next larger number of nodes for a few steps."""
        if self.reach is None:
            return
        requests = min(max(self._last.requests, 1), self._most)
        keys = self._last.keys / requests
        rates = width_rates(self.cost, self.heads_cost, self.reach.values(), self._grid, self._most, keys)
        self.widths = self._best = best_widths(rates, self._grid)
        self._trying = 0
        larger = self._grid.index(self._best[requests]) + 1
        if larger == len(self._grid):
            return
        of_best, of_larger = rates[larger - 1, requests - 1], rates[larger, requests - 1]
        step = float(self.cost.seconds(requests * (1 + self._grid[larger]), self._last.keys))
        loss = TRY_STEPS * step * (1.0 - float(of_larger / of_best))
        if self.tries.affords(loss):
            self.tries.spend(loss)
            self._trying = TRY_STEPS
            tried = [max(width, self._grid[larger]) for width in self._best[: requests + 1]]
            self.widths = tried + self._best[requests + 1 :]

    def ends_try(self) -> bool:
        """Whether a try has just lasted long enough; `widths` are the best again."""
        if self.widths is self._best or self._trying > 0:
            return False
        self.widths = self._best
        return True

    def learn_step(self, size: StepSize, seconds: dict[str, float]) -> None:
        """Seconds by stage of a step that only decodes (see `StageClock.finished`)."""
        heads = seconds.get("propose", 0.0)
        self._last, self._trying = size, self._trying - 1
        self.tries.earn(self.cost.observe(size.tokens, seconds["step"] - heads, size.keys, size.node_keys))
        if heads:
            self.heads_cost.observe(size.requests, heads)

    def learn_walks(self, promised: float, accepted: Sequence[int], checked: Sequence[int]) -> None:
        """Walks of any number of trees.

        Args:
            promised: the sum of their nodes' reach.
            accepted: [N], how many accepted their first, second, ... node.
            checked: [N], how many were not cut shorter; where a tree is smaller, its node there is none that could be.
        """
        if promised:
            self.trust.learn(promised, float(sum(accepted)), self.cost.clock)
        if self.reach is not None and any(checked):
            self.reach.learn(accepted, checked, self.cost.clock)

    def learnt(self) -> Learnt:
        """The same for the metrics."""
        return Learnt(self.trust.share, self.cost.by_size(), self.heads_cost.by_size())
