"""What serving on Model Runner V2 teaches: what steps cost, how far trees are reached, how many nodes therefore pay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_medusa.budget import Trust
from vllm_medusa.cost import StepCost
from vllm_medusa.host.metrics.figures import Learnt
from vllm_medusa.widths import MeasuredReach, best_widths, width_grid

TRY_EVERY = 30.0  # seconds after which drafts are tried again where they did not pay, until the next choice


class StepSize(NamedTuple):
    """How large a step was: its tokens, and its requests."""

    tokens: int
    requests: int


class Learning:
    """Costs and reach as known now, from plain values that have come from the device.

    Attributes:
        cost: seconds of a step by its tokens, without the heads.
        heads_cost: seconds of drafting, by requests.
        trust: accepted nodes over what drafts promised.
        reach: of each node of a tree; None: the number of nodes is not ours to choose.
        widths: nodes by number of requests, as chosen last.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.cost, self.heads_cost, self.trust = StepCost(), StepCost(), Trust()
        self.reach: MeasuredReach | None = None
        self.widths: list[int] | None = None
        self._grid: list[int] = []
        self._most = 0
        self._try_at = 0.0

    def choose_from(self, reach: Sequence[float], num_nodes: int, most: int, now: float) -> None:
        """Costs have been measured: choose from now on.

        Args:
            reach: of the first nodes, as calibrated.
            num_nodes: N, most nodes of a tree.
            most: requests.
            now: seconds, on any clock.
        """
        self.reach = MeasuredReach([*reach, *[0.0] * (num_nodes - len(reach))])
        self._grid, self._most = width_grid(num_nodes), most
        self._try_at = now + TRY_EVERY
        self.choose(now)

    def choose(self, now: float) -> None:
        """Choose `widths` anew."""
        if self.reach is None:
            return
        self.widths = best_widths(self.cost, self.heads_cost, self.reach.values(), self._grid, self._most)
        if now >= self._try_at:
            self._try_at = now + TRY_EVERY
            self.widths = [max(width, self._grid[1]) for width in self.widths]

    def learn_step(self, size: StepSize, seconds: dict[str, float]) -> None:
        """Seconds by stage of a step that only decodes (see `StageClock.finished`)."""
        heads = seconds.get("propose", 0.0)
        self.cost.observe(size.tokens, seconds["step"] - heads)
        if heads:
            self.heads_cost.observe(size.requests, heads)

    def learn_walks(self, promised: float, accepted: Sequence[int], checked: Sequence[int]) -> None:
        """Walks of any number of trees.

        Args:
            promised: the sum of their nodes' reach.
            accepted: [N], how many accepted their first, second, ... node.
            checked: [N], how many were not cut shorter; where a tree is smaller, its node there is none that could be.
        """
        self.trust.learn(promised, float(sum(accepted)))
        if self.reach is not None:
            self.reach.learn(accepted, checked)

    def learnt(self) -> Learnt:
        """The same for the metrics."""
        return Learnt(self.trust.share, self.cost.by_size(), self.heads_cost.by_size())
