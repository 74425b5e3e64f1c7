"""For which numbers of rows our product is quicker than another one, measured on the matrix itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.linear.operator import ALWAYS, ROWS, linear

Product = Callable[[Tensor], Tensor]

_ROUNDS, _FEWEST_ROUNDS = 9, 3
_SECONDS = 0.02  # for one number of rows, beyond the fewest rounds
_DEAR = 0.05  # seconds of one product: with more rows it will be as with these
_AGAIN = 2  # more times that a number of rows is looked at, at which our product seems a little slower
_LITTLE = 1.2
_CLEARLY = 1.5  # times as long, twice in a row: no need to look at more rows
_NOISE = 1.04  # what two measurements of one thing may differ by
_COLD_BYTES = 16 << 20  # of copies in turns: in a step, each matrix comes from beyond a core's own caches
_MOST_COPIES = 16
_ARITHMETIC = 64  # rows from which on it does not matter where the matrix comes from


@dataclass(frozen=True)
class Comparison:
    """Seconds of both products of one matrix.

    Attributes:
        own, other: by number of rows, those of `ROWS` that were measured.
    """

    own: dict[int, float]
    other: dict[int, float]

    @property
    def mask(self) -> int:
        """A bit for each of `ROWS` at which our product is as quick or quicker; beyond what was measured, as there.

        >>> bin(Comparison(own={1: 2.0, 2: 2.0, 4: 2.0}, other={1: 1.0, 2: 2.0, 4: 4.0}).mask)
        '0b111111110'
        """
        quicker = [self.own[rows] <= self.other[rows] for rows in ROWS if rows in self.own]
        quicker += quicker[-1:] * (len(ROWS) - len(quicker))
        return sum(bit << place for place, bit in enumerate(quicker))

    @property
    def never_slower(self) -> bool:
        """Our product is nowhere slower, beyond noise, and quicker on the whole.

        >>> Comparison(own={1: 1.01, 8: 1.1}, other={1: 1.0, 8: 2.0}).never_slower
        True
        """
        ratios = [self.ratio(rows) for rows in self.own]
        return min(ratios) * _NOISE >= 1.0 and math.prod(ratios) > 1.0

    def to_json(self) -> list[list[float]]:
        """Rows, seconds of ours, seconds of the other."""
        return [[rows, self.own[rows], self.other[rows]] for rows in self.own]

    @classmethod
    def from_json(cls, table: Any) -> Comparison | None:
        """What `to_json` gave; None if it is anything else.

        >>> Comparison.from_json([[1, 0.1, 0.2]]), Comparison.from_json([[1, "soon", 0.2]])
        (Comparison(own={1: 0.1}, other={1: 0.2}), None)
        """
        try:
            own = {int(rows): float(seconds) for rows, seconds, _ in table}
            other = {int(rows): float(seconds) for rows, _, seconds in table}
        except (TypeError, ValueError):
            return None
        sound = own and set(own) <= set(ROWS) and all(0.0 < x < math.inf for x in (*own.values(), *other.values()))
        return cls(own, other) if sound else None

    def ratio(self, rows: int) -> float:
        """How many times as long the other product takes for `rows`, or for the most rows that were measured."""
        rows = rows if rows in self.own else max(self.own)
        return self.other[rows] / self.own[rows]


@torch.inference_mode()
def compare(weight: Tensor, other: Callable[[Tensor], Product]) -> Comparison:
    """Time both products of a matrix, in turns.

    Args:
        weight: [N, K], on a CPU.
        other: makes the other product of such a matrix: from rows [n, K] to [n, N].
    """
    operator = linear()
    assert operator is not None, "without our product there is nothing to compare"
    size = weight.numel() * weight.element_size()
    copies = [weight, *(weight.clone() for _ in range(min(_MOST_COPIES, _COLD_BYTES // size)))]
    others = [other(copy) for copy in copies]
    found = Comparison({}, {})
    clear = 0
    for count in ROWS:
        if found.own and count * max(found.other.values()) > _DEAR * max(found.own):
            break
        rows = torch.randn(count, weight.shape[1]).to(weight.dtype)

        used = len(copies) if count < _ARITHMETIC else 1

        def own_way(rows: Tensor = rows, used: int = used) -> None:
            for copy in copies[:used]:
                operator(rows, copy, None, ALWAYS)

        def other_way(rows: Tensor = rows, used: int = used) -> None:
            for product in others[:used]:
                product(rows)

        best = (math.inf, math.inf)
        for _ in range(1 + _AGAIN):
            best = _quickest(own_way, other_way, best)
            if not 1.0 < best[0] / best[1] < _LITTLE:
                break
        found.own[count], found.other[count] = best[0] / used, best[1] / used
        clear = clear + 1 if best[1] > _CLEARLY * best[0] else 0
        if clear >= 2 and count >= 8:
            break
    return found


def _quickest(one: Callable[[], None], two: Callable[[], None], best: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the quickest run of either, in turns, no more than `best`."""
    began = time.perf_counter()
    for done in range(1 + _ROUNDS):
        seconds = _time(one), _time(two)
        if done:  # the first round builds what is built on first use
            best = min(best[0], seconds[0]), min(best[1], seconds[1])
        if done >= _FEWEST_ROUNDS and time.perf_counter() - began > _SECONDS:
            break
    return best


def _time(way: Callable[[], None]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began
