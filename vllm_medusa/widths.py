"""How many nodes each request drafts, where the host decides that by the number of requests alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.cost import StepCost, faded

Ranges = list[tuple[int, int, int]]  # first and last number of requests, nodes for each of them
DOUBT = 32.0  # trees for which calibration counts
MEMORY = 4096.0  # trees over which `MeasuredReach` forgets
LEFT = 4.0  # trees that it still stands for when all of it has faded


class MeasuredReach:
    """How likely the walk gets to the first, second, ... node of a tree: what is calibrated, then what serving shows.

    Nodes come in the order in which they are likely to be reached, whatever guessed them, so a tree cut to n nodes
    brings what its first n have brought. As with `Trust`, what was seen fades in its weight: a few tries tell whether
    it is still right.

    >>> reach = MeasuredReach([0.5, 0.25])
    >>> reach.learn([0, 0], [32, 0])
    >>> reach.values().tolist()
    [0.25, 0.25]
    """

    def __init__(self, first: Sequence[float]) -> None:
        """Start from the reach of each node, as calibrated."""
        self._tried = np.full(len(first), DOUBT)
        self._accepted = self._tried * np.asarray(first, dtype=np.float64)
        self._at = 0.0

    def learn(self, accepted: Sequence[int], checked: Sequence[int], now: float = 0.0) -> None:
        """How many of some trees accepted their first, second, ... node, and how many were not cut shorter.

        Args:
            accepted, checked: [N].
            now: seconds of serving.
        """
        left = np.maximum(faded(max(now - self._at, 0.0)), np.minimum(LEFT / self._tried, 1.0))
        self._at = max(now, self._at)
        self._accepted *= left
        self._tried *= left
        self._accepted += accepted
        self._tried += checked
        fade = np.minimum(MEMORY / self._tried, 1.0)
        self._accepted *= fade
        self._tried *= fade

    def values(self) -> npt.NDArray[np.float64]:
        """float64 [N]."""
        return np.asarray(self._accepted / self._tried, dtype=np.float64)


def width_grid(num_nodes: int) -> list[int]:
    """The numbers of nodes to choose from: few, since a device captures the steps of each of them once.

    >>> width_grid(63), width_grid(2)
    ([0, 15, 31, 63], [0, 1, 2])
    """
    return sorted({0, num_nodes // 4, num_nodes // 2, num_nodes})


def first_ranges(num_nodes: int) -> Ranges:
    """A guess, for the steps before anything is measured: about as many tokens in a step up to 32 requests, then none.

    >>> first_ranges(63)
    [(1, 8, 63), (9, 16, 31), (17, 32, 15), (33, 64, 0)]
    """
    widths = sorted(width_grid(num_nodes), reverse=True)
    return [(1 if not i else (8 << (i - 1)) + 1, 8 << i, width) for i, width in enumerate(widths)]


def width_rates(
    cost: StepCost, heads_cost: StepCost, reach: npt.ArrayLike, grid: Sequence[int], most: int, keys: float = 0.0
) -> npt.NDArray[np.float64]:
    """Expected tokens per second [G, B] with each number of nodes, for 1, 2, ... requests.

    n nodes for each of b requests are expected to bring b (1 + the sum of their probabilities) tokens, in the time of
    a step of b (1 + n) tokens and, for n > 0, of asking the heads.

    Args:
        cost: seconds of a step by its tokens, without the heads.
        heads_cost: seconds of asking the heads, by requests.
        reach: probability of each node of the best tree, likeliest first.
        grid: G numbers of nodes to choose from.
        most: B, most requests.
        keys: tokens in the cache, a request.
    """
    gains = 1.0 + np.concatenate(([0.0], np.cumsum(np.asarray(reach, dtype=np.float64))))  # by nodes, from 0 on
    requests = np.arange(1, most + 1)
    asking = heads_cost.seconds(requests)
    rates: list[npt.NDArray[np.float64]] = []
    for width in grid:
        seconds = cost.seconds(requests * (1 + width), requests * keys, requests * (width * keys))
        rates.append(requests * gains[min(width, len(gains) - 1)] / (seconds + (asking if width else 0.0)))
    return np.stack(rates)


def best_widths(rates: npt.NDArray[np.float64], grid: Sequence[int]) -> list[int]:
    """The number of nodes with the best of `rates` [G, B] (see `width_rates`), for every number of requests.

    Returns:
        B + 1 widths, by requests; the first stands for no request.

    A step of up to 8 tokens takes one second, then they get dear:

    >>> cost, heads = StepCost.from_points([(1, 1.0), (8, 1.0), (16, 4.0)]), StepCost.from_points([(1, 0.1), (8, 0.1)])
    >>> best_widths(width_rates(cost, heads, [0.8, 0.5, 0.3], [0, 1, 3], most=8), [0, 1, 3])
    [3, 3, 3, 1, 1, 0, 0, 0, 0]
    """
    best = [grid[place] for place in rates.argmax(axis=0)]  # of equals the fewest
    return [best[0], *best]
