"""How many nodes are worth drafting in a step, and whether the heads are worth asking at all."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vllm_medusa.between import Between
from vllm_medusa.cost import GRID, StepCost
from vllm_medusa.tries import Tries

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

WEIGH_EVERY = 4  # steps between two looks at what the heads bring
PROMISING = 0.9  # of the best rate: what a size must be thought to reach to be tried


@dataclass
class _Habit:
    """What was decided for one batch size: nodes in all, whether the heads are asked, and what asking has gained."""

    nodes: int | None = None
    rate: float = 0.0  # tokens per second with so many
    asks: bool = True
    gain: float = 0.0  # running mean of log(rate with heads / rate without)
    weighed: int = 0  # how often
    since: int = 0  # steps since the heads were last asked in vain


class NodeBudget:
    """Shares the nodes of one step among the requests of a batch so that tokens per second are most.

    A node is worth its marginal time if that time costs fewer tokens, at the rate reached, than the node brings
    (its probability of being accepted). Taking nodes in order of what they bring, the rate R(n) = expected tokens(n) /
    seconds(n) rises while that holds, so the best n is where R peaks. The heads cost time too: where the best tree
    with them is not worth that time, they are not asked. Both are tried again for ever, within what `tries` allows.

    Attributes:
        cost: seconds of steps without the heads.
        heads_cost: seconds of asking them, by requests.
        tries: tell it what serving takes.
        between: what passes between steps; a step is worth sparing with all that it takes.
    """

    def __init__(
        self, cost: StepCost, *, hysteresis: float = 0.01, explore_every: int = 16, retry_every: int = 16
    ) -> None:
        """Keep the last number of nodes unless another is better by `hysteresis`.

        Another number is tried every `explore_every` steps at most, or where nothing pays as often as can be afforded;
        heads that did not pay are asked every `retry_every` steps at most.
        """
        self.cost = cost
        self.heads_cost = StepCost()
        self.tries = Tries()
        self.between = Between()
        self.hysteresis = hysteresis
        self.explore_every = explore_every
        self.retry_every = retry_every
        self._habits: dict[int, _Habit] = {}  # by tokens of the step without drafts
        self._steps = 0

    def asks_heads(self, batch: int, other_tokens: int = 0) -> bool:
        """Whether to ask the heads for `batch` requests; `other_tokens` as in `share`."""
        habit = self._habits.setdefault(batch + other_tokens, _Habit())
        if habit.asks:
            return True
        habit.since += 1
        if habit.since > self.retry_every:
            loss = self._asking(batch)
            if self.tries.affords(loss):
                self.tries.spend(loss)
                return True
        return False

    def share(
        self,
        reach: Floats,
        sizes: Ints,
        other_tokens: int = 0,
        *,
        without_heads: Floats | None = None,
        trust: Floats | None = None,
        context: Ints | None = None,
        other_keys: float = 0.0,
    ) -> Ints:
        """How many of its nodes each request drafts.

        Args:
            reach: float32 [B, N], probability of acceptance of each node.
            sizes: int64 [B], nodes each request has to offer.
            other_tokens: tokens in the step besides these requests' (rows of requests that draft nothing).
            without_heads: float32 [B, L], probabilities of the nodes there would be had the heads not been asked;
                None: they were not.
            trust: float32 [B], what such a probability is worth; None: all of it.
            context: int64 [B], tokens of each request in the cache, which each of its nodes reads; None: not known.
            other_keys: what the rows of `other_tokens` read.

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
        tokens = batch + other_tokens
        habit = self._habits.setdefault(tokens, _Habit())
        keys, dues = 0.0, None
        if context is not None:
            keys = float(context.sum()) + other_keys
            dues = self._dues(habit, batch, tokens, keys, context)
        worth = _worth(reach, trust, dues)
        offered = np.arange(width) < sizes[:, None]
        ordered = np.sort(worth[offered])[::-1]
        counts = _counts(tokens, len(ordered))
        gained, seconds = self._outlook(batch, tokens, counts, ordered, keys)
        if without_heads is not None:
            seconds = seconds + self._asking(batch)
        if without_heads is not None and (habit.weighed < 8 or not habit.asks or self._steps % WEIGH_EVERY == 0):
            bare = np.sort(_worth(without_heads, trust, dues)[without_heads > 0.0])[::-1]
            alone, time = self._outlook(batch, tokens, _counts(tokens, len(bare)), bare, keys)
            self._weigh(habit, float((gained / seconds).max()), float((alone / time).max()))
        nodes = int(counts[self._settle(habit, tokens, counts, gained, seconds)])
        if nodes == 0:
            return np.zeros_like(sizes)
        worth[~offered] = -np.inf
        cutoff = ordered[nodes - 1]
        taken = (worth >= cutoff).sum(axis=1)
        more = int(taken.sum()) - nodes
        for request in np.flatnonzero(taken)[::-1] if more else ():  # ties at the edge, first come first served
            spare = min(more, int((worth[request] == cutoff).sum()))
            taken[request] -= spare
            more -= spare
        return np.asarray(taken, dtype=np.int64)

    def _dues(self, habit: _Habit, batch: int, tokens: int, keys: float, context: Ints) -> Floats | None:
        """float32 [B], what the keys that a node of each request reads cost, in tokens at the rate lately reached."""
        if self.cost.node_key_seconds == 0.0:
            return None
        rate = habit.rate or batch / (float(self.cost.seconds(tokens, keys)) + self.between.seconds)
        return np.asarray(rate * self.cost.node_key_seconds * context, dtype=np.float32)

    def _asking(self, batch: int) -> float:
        return float(self.heads_cost.seconds(batch)) if self.heads_cost.cells else 0.0

    def _outlook(self, batch: int, tokens: int, counts: Ints, ordered: Floats, keys: float) -> tuple[Doubles, Doubles]:
        """Expected tokens (less dues) and seconds (without what these are for) [C] with `counts` nodes of `ordered`."""
        gained = batch + np.concatenate(([0.0], np.cumsum(ordered)))
        return gained[counts], self.cost.seconds(tokens + counts, keys) + self.between.seconds

    def _weigh(self, habit: _Habit, asked: float, bare: float) -> None:
        """Were the heads worth their time? A mean over steps, with some slack against fluttering."""
        gain = float(np.log(asked / bare))
        if not habit.asks and gain <= 0.0:
            habit.since = 0  # in vain; else they are asked at once again
        habit.weighed += 1
        habit.gain += max(0.1, 1.0 / habit.weighed) * (gain - habit.gain)
        if habit.weighed >= 8:
            habit.asks = habit.gain > (-0.003 if habit.asks else 0.003)

    def _settle(self, habit: _Habit, tokens: int, counts: Ints, gained: Doubles, seconds: Doubles) -> int:
        """The place among `counts` of the number of nodes to draft, by the tokens and seconds expected of each."""
        rate = gained / seconds
        best = int(rate.argmax())
        last = best if habit.nodes is None else int(np.searchsorted(counts, habit.nodes, side="right")) - 1
        if rate[best] <= rate[last] * (1.0 + self.hysteresis):
            best = last
        habit.nodes = int(counts[best])
        # What dues are reckoned by. They lower the rate that raises them: half of a step at a time, so that it settles.
        habit.rate += (0.5 if habit.rate else 1.0) * (float(rate[best]) - habit.rate)
        self._steps += 1
        if len(counts) > 1 and (best == 0 or self._steps % self.explore_every == 0):
            return self._try(best, tokens, counts, gained, seconds)
        return best

    def _try(self, best: int, tokens: int, counts: Ints, gained: Doubles, seconds: Doubles) -> int:
        """Another place than the `best`, if what that loses can be afforded."""
        loss = seconds - gained * (seconds[best] / gained[best])
        if best == 0:
            # Nothing pays, so nothing is learnt of drafts either: the number that tells most of them for the time.
            other = 1 + int(((gained[1:] - gained[0]) / np.maximum(loss[1:], 1e-9)).argmax())
        else:
            # Of those that may well be as good the one that was not seen for longest: times go stale.
            promising = np.flatnonzero(seconds[best] * gained >= PROMISING * gained[best] * seconds)
            other = int(min(promising, key=lambda place: self.cost.last_seen(tokens + int(counts[place]))))
        if other == best or not self.tries.affords(float(loss[other])):
            return best
        self.tries.spend(max(float(loss[other]), 0.0))
        return other


def _worth(reach: Floats, trust: Floats | None, dues: Floats | None) -> Floats:
    """float32 [B, N], what each node brings: its probability times `trust`, less `dues` (both [B])."""
    # A node counts no more than those before it, so that what is taken of a request is a prefix.
    worth = np.minimum.accumulate(reach, axis=1)
    if trust is not None:
        worth = worth * trust[:, None]
    return worth if dues is None else worth - dues[:, None]


@lru_cache(4096)
def _counts(tokens: int, offered: int) -> Ints:
    """int64 [C], from 0 up, how many of `offered` nodes may join a step that has `tokens` tokens without them.

    Those that make a step of a size on the grid: the host builds and keeps something for every size it meets, and what
    a size costs is known best where it was seen. Where less is offered than would reach the grid, all of it.
    """
    first, end = bisect.bisect_right(GRID, tokens), bisect.bisect_right(GRID, tokens + offered)
    if first == end:
        return np.unique(np.array([0, offered], dtype=np.int64))
    return np.array([0, *(size - tokens for size in GRID[first:end])], dtype=np.int64)
