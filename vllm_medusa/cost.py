"""What a step costs by the tokens in it, learnt while serving."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_medusa.pace import STALL, Pace

# Step sizes, in tokens, at which times are kept; times between them are interpolated.
GRID: tuple[int, ...] = (
    *range(1, 10),
    *(10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 88, 96, 104, 112, 120, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048),
)
LARGEST = GRID[-1]
REFRESH = 8  # observations after which a curve is drawn anew
RECENT = 20.0  # steps over which a size's time of late is a mean
LASTING = 256.0  # steps over which its lasting time is one
LASTS = 4.0  # recent steps that count as much as it does
FADING = 2.0  # seconds of serving after which what was seen of late counts half


@dataclass
class _Cell:
    """Times seen at one step size: of late, and all in all.

    The time of late is what counts, but it fades: a size that looked dear in a bad minute, and was therefore not served
    any more, is thought to be what it has always been a few seconds later.
    """

    seconds: float
    lasting: float
    weight: float = 1.0  # steps that `seconds` stands for
    count: int = 1
    at: float = 0.0  # when it was seen last

    def update(self, seconds: float, share: float, now: float) -> None:
        """Learn from a step, of which `share` tells of its size."""
        self.weight = min(self.weight * faded(now - self.at) + 1.0, RECENT)
        self.count += 1
        self.at = now
        # A stall (another process, a page fault) counts as a quarter more at most.
        self.seconds += share * (min(seconds, STALL * self.seconds) - self.seconds) / self.weight
        self.lasting += share * (min(seconds, STALL * self.lasting) - self.lasting) / min(self.count, LASTING)

    def believed(self, now: float) -> tuple[float, float]:
        """Seconds, and how many steps they stand for."""
        weight = self.weight * faded(now - self.at)
        return (weight * self.seconds + LASTS * self.lasting) / (weight + LASTS), weight + LASTS


@dataclass
class StepCost:
    """Seconds of a step against its tokens, never falling, interpolated between the sizes seen, and the keys it reads.

    Machines have slow minutes. Were each size's time kept as it was seen, those that happened to be served in a slow
    minute would look dear. So a pace is kept beside the curve: what all sizes lately took, over what they were expected
    to; sizes are compared at the same pace. And were the time that long texts take not kept apart, those sizes would
    look dear that happened to be served with them (see `Pace`).

    >>> cost = StepCost.from_points([(1, 0.024), (9, 0.032)])
    >>> round(float(cost.seconds(5)), 3)
    0.028

    Attributes:
        clock: seconds of all steps observed, without stalls; time, as far as forgetting goes. The same on all ranks.
    """

    cells: dict[int, _Cell] = field(default_factory=dict)
    clock: float = 0.0
    _pace: Pace = field(default_factory=Pace)
    _curve: tuple[npt.NDArray[np.float64], float] | None = None
    _since: int = 0  # observations that the curve does not hold yet

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]]) -> StepCost:
        """A model that starts from measured (tokens, seconds)."""
        cost = cls()
        for tokens, seconds in points:
            cost.seed(tokens, seconds)
        return cost

    @property
    def pace(self) -> float:
        """What steps lately took, over what they were expected to take."""
        return self._pace.value

    def seed(self, tokens: int, seconds: float) -> None:
        """Take a time for what it is: measured with care, before serving, at the same pace as others, without keys."""
        self._learn(tokens, seconds, 1.0)

    def observe(self, tokens: int, seconds: float, keys: float = 0.0, node_keys: float = 0.0) -> float:
        """Learn from one decode step (prefill steps are not for this); returns its seconds, without a stall.

        Args:
            tokens: in the step, T.
            seconds: that it took.
            keys: in the cache before its requests' roots, summed over requests.
            node_keys: the same, summed over nodes.
        """
        share, bounded = 1.0, seconds
        if self.known:
            # The first step of a size also builds what the host keeps for it: bounded as any stall is.
            own = self._own(tokens)
            bounded = self._pace.learn(seconds, own, keys, node_keys)
            of_keys = self._pace.of_keys(keys, node_keys)
            share = (own / (own + of_keys)) ** 2
            seconds = max(bounded / self.pace - of_keys, own / 4.0)
        self.clock += bounded
        self._learn(tokens, seconds, share)
        return bounded

    def _learn(self, tokens: int, seconds: float, share: float) -> None:
        size = grid_size(tokens)
        cell = self.cells.get(size)
        if cell is None:
            self.cells[size] = _Cell(seconds, seconds, at=self.clock)
        else:
            fresh = self.clock - cell.at < FADING
            cell.update(seconds, share, self.clock)
        self._since += 1
        if cell is None or not fresh or self._since >= REFRESH:
            self._curve, self._since = None, 0

    @property
    def known(self) -> bool:
        """Whether there is enough to tell more tokens from fewer."""
        return len(self.cells) >= 2

    def steps_at(self, tokens: int) -> int:
        """How many steps of the size that stands for `tokens` were seen."""
        cell = self.cells.get(grid_size(tokens))
        return cell.count if cell is not None else 0

    def last_seen(self, tokens: int) -> float:
        """When a step of the size that stands for `tokens` was seen last, on `clock`; -1: never."""
        cell = self.cells.get(grid_size(tokens))
        return cell.at if cell is not None else -1.0

    def seconds(
        self, tokens: int | npt.NDArray[np.int64], keys: npt.ArrayLike = 0.0, node_keys: npt.ArrayLike = 0.0
    ) -> npt.NDArray[np.float64]:
        """Expected seconds of a step, arguments as of `observe`; beyond the largest size the mean slope goes on."""
        curve, slope = self._drawn()
        tokens = np.asarray(tokens)
        found = curve[np.minimum(tokens, LARGEST)]
        if tokens.max() > LARGEST:
            found = found + slope * np.maximum(tokens - LARGEST, 0)
        pace = self._pace
        if pace.by_key or pace.by_node_key:
            found = found + (pace.by_key * np.asarray(keys) + pace.by_node_key * np.asarray(node_keys))
        return np.asarray(pace.value * found)

    @property
    def node_key_seconds(self) -> float:
        """What a node takes for each key it reads, at the present pace."""
        return self._pace.by_node_key * self._pace.value

    def _drawn(self) -> tuple[npt.NDArray[np.float64], float]:
        if self._curve is None:
            self._curve = self._draw()
        return self._curve

    def _own(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens that read no key, at the usual pace."""
        curve, slope = self._drawn()
        return float(curve[min(tokens, LARGEST)]) + slope * max(tokens - LARGEST, 0)

    def by_size(self) -> dict[int, float]:
        """Seconds at the present pace, to the microsecond, of each step size seen."""
        return {size: round(cell.believed(self.clock)[0] * self.pace, 6) for size, cell in sorted(self.cells.items())}

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
            block = (*cell.believed(self.clock), [size])
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


def faded(seconds: float) -> float:
    """What is left of a weight after so many seconds of serving.

    >>> faded(0.0), faded(FADING)
    (1.0, 0.5)
    """
    return float(0.5 ** (seconds / FADING))


def grid_size(tokens: int) -> int:
    """The largest kept size that is not above `tokens`, so that no size is thought cheaper than it is.

    >>> grid_size(9), grid_size(11), grid_size(5000)
    (9, 10, 2048)
    """
    return GRID[max(bisect.bisect_right(GRID, tokens) - 1, 0)]
