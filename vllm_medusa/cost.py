"""What a step costs by the tokens in it, learnt while serving."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Step sizes, in tokens, at which times are kept; times between them are interpolated.
GRID: tuple[int, ...] = (
    *range(1, 10),
    *(10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 104, 112, 120, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048),
)
LARGEST = GRID[-1]
REFRESH = 8  # observations after which a curve is drawn anew
STALL = 1.25  # a step that took longer than this times the expected says nothing about the work
PACE_RATE = 0.3  # how much of a surprise is laid to the machine's pace rather than to the size of the step


@dataclass
class _Cell:
    """Times seen at one step size: a running estimate that one slow step cannot move far."""

    seconds: float
    count: int = 1

    def update(self, seconds: float) -> None:
        rate = max(0.05, 1.0 / (self.count + 1))
        # A stall (another process, a page fault) counts as a quarter more at most.
        self.seconds += rate * (min(seconds, STALL * self.seconds) - self.seconds)
        self.count += 1


@dataclass
class StepCost:
    """Seconds of a step against its tokens: never falling, interpolated between the sizes seen.

    Machines have slow minutes. Were each size's time kept as it was seen, those that happened to be served in a slow
    minute would look dear. So a pace is kept beside the curve: what all sizes lately took, over what they were expected
    to; sizes are compared at the same pace.

    >>> cost = StepCost.from_points([(1, 0.024), (9, 0.032)])
    >>> round(float(cost.seconds(5)), 3)
    0.028
    """

    cells: dict[int, _Cell] = field(default_factory=dict)
    pace: float = 1.0
    _curve: tuple[npt.NDArray[np.float64], float] | None = None
    _since: int = 0  # observations that the curve does not hold yet

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]]) -> StepCost:
        """A model that starts from measured (tokens, seconds)."""
        cost = cls()
        for tokens, seconds in points:
            cost.seed(tokens, seconds)
        return cost

    def seed(self, tokens: int, seconds: float) -> None:
        """Take a time for what it is: measured with care, before serving, at the same pace as others."""
        self._learn(tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one decode step of `tokens` tokens (prefill steps are not for this)."""
        if self.known:
            # The first step of a size also builds what the host keeps for it: bounded as any stall is.
            expected = float(self.seconds(tokens))
            seconds = min(seconds, STALL * expected)
            self.pace *= (seconds / expected) ** PACE_RATE
        self._learn(tokens, seconds / self.pace)

    def _learn(self, tokens: int, seconds: float) -> None:
        size = grid_size(tokens)
        cell = self.cells.get(size)
        if cell is None:
            self.cells[size] = _Cell(seconds)
        else:
            cell.update(seconds)
        self._since += 1
        if cell is None or self._since >= REFRESH:
            self._curve, self._since = None, 0

    @property
    def known(self) -> bool:
        """Whether there is enough to tell more tokens from fewer."""
        return len(self.cells) >= 2

    def steps_at(self, tokens: int) -> int:
        """How many steps of the size that stands for `tokens` were seen."""
        cell = self.cells.get(grid_size(tokens))
        return cell.count if cell is not None else 0

    def seconds(self, tokens: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Expected seconds of a step of `tokens` tokens; beyond the largest size seen the mean slope goes on."""
        if self._curve is None:
            self._curve = self._draw()
        curve, slope = self._curve
        tokens = np.asarray(tokens)
        found = curve[np.minimum(tokens, LARGEST)]
        if tokens.max() > LARGEST:
            found = found + slope * np.maximum(tokens - LARGEST, 0)
        return np.asarray(self.pace * found)

    def by_size(self) -> dict[int, float]:
        """Seconds at the present pace, to the microsecond, of each step size seen."""
        return {size: round(cell.seconds * self.pace, 6) for size, cell in sorted(self.cells.items())}

    def table(self) -> list[dict[str, float]]:
        """One row per step size seen: tokens, milliseconds at the present pace, steps."""
        return [
            {"tokens": size, "milliseconds": round(seconds * 1e3, 3), "steps": self.cells[size].count}
            for size, seconds in self.by_size().items()
        ]

    def _draw(self) -> tuple[npt.NDArray[np.float64], float]:
        """Seconds of steps of 0 to LARGEST tokens, and per token beyond. Never falling: neighbours that contradict each
        other share their weighted mean."""
        blocks: list[tuple[float, float, list[int]]] = []  # (seconds, weight, sizes)
        for size, cell in sorted(self.cells.items()):
            block = (cell.seconds, float(min(cell.count, 20)), [size])
            while blocks and blocks[-1][0] > block[0]:
                seconds, weight, members = blocks.pop()
                total = weight + block[1]
                block = ((seconds * weight + block[0] * block[1]) / total, total, members + block[2])
            blocks.append(block)
        sizes = [size for _, _, members in blocks for size in members]
        times = [seconds for seconds, _, members in blocks for _ in members]
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) >= 2 else 0.0
        tokens = np.arange(LARGEST + 1)
        return np.interp(tokens, sizes, times) + np.maximum(tokens - sizes[-1], 0) * slope, slope


def grid_size(tokens: int) -> int:
    """The largest kept size that is not above `tokens`, so that no size is thought cheaper than it is.

    >>> grid_size(9), grid_size(11), grid_size(5000)
    (9, 10, 2048)
    """
    return GRID[max(bisect.bisect_right(GRID, tokens) - 1, 0)]
