"""How many nodes are worth drafting in a step, and whether the heads are worth asking at all."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_medusa.cost import GRID, StepCost

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MEMORY = 512.0  # promised tokens over which `Trust` forgets
DOUBT = 32.0  # promised tokens that it takes for granted at first
LEAST_TRUST, MOST_TRUST = 0.05, 1.25
PROMISING = 0.9  # of the best rate: what a size must be thought to reach to be tried


class Trust:
    """How much of what drafts promise comes true: accepted nodes over the sum of their probabilities.

    Heads without calibration, of another model or at another temperature promise what they do not keep. Drafting by
    what they keep, speculation shrinks to what pays, down to nothing.

    >>> trust = Trust()
    >>> trust.learn(promised=96.0, accepted=32)
    >>> trust.share
    0.5
    """

    def __init__(self) -> None:
        """Believe every word, for now."""
        self._promised = self._accepted = DOUBT

    def learn(self, promised: float, accepted: float) -> None:
        """Count one step: the sum of its nodes' probabilities, and how many were accepted."""
        self._promised += promised
        self._accepted += accepted
        if self._promised > MEMORY:
            self._accepted *= MEMORY / self._promised
            self._promised = MEMORY

    @property
    def share(self) -> float:
        """What a promised token is worth, LEAST_TRUST to MOST_TRUST (never nothing, so that it can recover)."""
        return min(max(self._accepted / self._promised, LEAST_TRUST), MOST_TRUST)


@dataclass
class _Habit:
    """What was decided for one batch size: nodes in all, whether the heads are asked, and what asking has gained."""

    nodes: int | None = None
    asks: bool = True
    gain: float = 0.0  # running mean of log(rate with heads / rate without)
    tries: int = 0
    since: int = 0  # steps since the heads were last asked


class NodeBudget:
    """Shares the nodes of one step among the requests of a batch so that tokens per second are most.

    A node is worth its marginal time if that time costs fewer tokens, at the rate reached, than the node brings
    (its probability of being accepted). Taking nodes in order of probability, the rate R(n) = expected tokens(n) /
    seconds(n) rises while that holds, so the best n is where R peaks. The heads cost time too: where the best tree
    with them is not worth that time, they are not asked, but for a try now and then.
    """

    def __init__(
        self, cost: StepCost, *, hysteresis: float = 0.01, explore_every: int = 16, retry_every: int = 48
    ) -> None:
        """Keep the last number of nodes unless another is better by `hysteresis`; try another now and then.

        `cost` is of steps without the heads; `heads_cost`, learnt beside it, is of asking them for so many requests.
        """
        self.cost = cost
        self.heads_cost = StepCost()
        self.trust = Trust()
        self.hysteresis = hysteresis
        self.explore_every = explore_every
        self.retry_every = retry_every
        self._habits: dict[int, _Habit] = {}  # by tokens of the step without drafts
        self._steps = 0

    def asks_heads(self, batch: int, other_tokens: int = 0) -> bool:
        """Whether to ask the heads for `batch` requests; `other_tokens` as in `share`."""
        habit = self._habits.setdefault(batch + other_tokens, _Habit())
        if habit.asks or habit.since >= self.retry_every:
            habit.since = 0
            return True
        habit.since += 1
        return False

    def share(
        self,
        reach: Floats,
        sizes: Ints,
        other_tokens: int = 0,
        *,
        without_heads: Floats | None = None,
    ) -> Ints:
        """How many of its nodes each request drafts.

        Args:
            reach: float32 [B, N], probability of acceptance of each node.
            sizes: int64 [B], nodes each request has to offer.
            other_tokens: tokens in the step besides these requests' (rows of requests that draft nothing).
            without_heads: float32 [B, L], probabilities of the nodes there would be had the heads not been asked;
                None: they were not.

        Returns:
            int64 [B], at most `sizes`; all of `sizes` while the cost of a step is not known.

        Two requests, one sure of itself; a ninth token would cost more than it brings:

        >>> cost = StepCost.from_points([(1, 1.0), (4, 1.1), (8, 4.0)])
        >>> NodeBudget(cost).share(np.array([[.9, .8], [.3, .1]], dtype=np.float32), np.array([2, 2])).tolist()
        [2, 0]
        """
        batch, width = reach.shape
        if width == 0 or not self.cost.known:
            return sizes.copy()
        offered = np.arange(width) < sizes[:, None]
        # A node counts no more than those before it, so that what is taken of a request is a prefix.
        worth = np.where(offered, np.minimum.accumulate(reach, axis=1), -1.0)
        ordered = np.sort(worth[offered])[::-1]
        asking = 0.0
        if without_heads is not None and self.heads_cost.cells:
            asking = float(self.heads_cost.seconds(batch))
        rate = self._rates(batch, other_tokens, ordered, asking)
        counts = _counts(batch + other_tokens, len(ordered))
        habit = self._habits.setdefault(batch + other_tokens, _Habit())
        if without_heads is not None:
            bare = np.sort(without_heads[without_heads > 0.0])[::-1]
            self._weigh(habit, rate, self._rates(batch, other_tokens, bare, 0.0))
        nodes = int(counts[self._settle(habit, batch + other_tokens, counts, rate[counts])])
        if nodes == 0:
            return np.zeros_like(sizes)
        cutoff = ordered[nodes - 1]
        taken = (worth > cutoff).sum(axis=1)
        for request in np.flatnonzero((worth == cutoff).any(axis=1)):  # ties at the edge, first come first served
            spare = nodes - int(taken.sum())
            taken[request] += min(spare, int((worth[request] == cutoff).sum()))
        return np.asarray(taken, dtype=np.int64)

    def _rates(self, batch: int, other_tokens: int, ordered: Floats, asking: float) -> npt.NDArray[np.float64]:
        """Expected tokens per second with the first 0, 1, 2, ... nodes of `ordered`."""
        gained = batch + self.trust.share * np.concatenate(([0.0], np.cumsum(ordered)))
        rates: npt.NDArray[np.float64] = gained / (
            asking + self.cost.seconds(batch + other_tokens + np.arange(len(gained)))
        )
        return rates

    def _weigh(self, habit: _Habit, asked: npt.NDArray[np.float64], bare: npt.NDArray[np.float64]) -> None:
        """Were the heads worth their time? A mean over steps, with some slack against fluttering."""
        gain = float(np.log(asked.max() / bare.max()))
        habit.tries += 1
        habit.gain += max(0.1, 1.0 / habit.tries) * (gain - habit.gain)
        if habit.tries >= 8:
            habit.asks = habit.gain > (-0.003 if habit.asks else 0.003)

    def _settle(self, habit: _Habit, tokens: int, counts: Ints, rate: npt.NDArray[np.float64]) -> int:
        """The place among `counts`, whose rates are `rate`, of the number of nodes to draft."""
        best = int(rate.argmax())
        last = best if habit.nodes is None else int(np.searchsorted(counts, habit.nodes, side="right")) - 1
        if rate[best] <= rate[last] * (1.0 + self.hysteresis):
            best = last
        habit.nodes = int(counts[best])
        self._steps += 1
        if best > 0 and self._steps % self.explore_every == 0:
            # Of those that may well be as good, the one known least: times that are never looked at again go stale.
            promising = np.flatnonzero(rate >= PROMISING * rate[best])
            best = int(min(promising, key=lambda place: self.cost.steps_at(tokens + int(counts[place]))))
        return best


def _counts(tokens: int, offered: int) -> Ints:
    """int64 [C], from 0 up, how many of `offered` nodes may join a step that has `tokens` tokens without them.

    Those that make a step of a size on the grid: the host builds and keeps something for every size it meets, and what
    a size costs is known best where it was seen. Where less is offered than would reach the grid, all of it.
    """
    first, end = bisect.bisect_right(GRID, tokens), bisect.bisect_right(GRID, tokens + offered)
    if first == end:
        return np.unique(np.array([0, offered], dtype=np.int64))
    return np.array([0, *(size - tokens for size in GRID[first:end])], dtype=np.int64)
