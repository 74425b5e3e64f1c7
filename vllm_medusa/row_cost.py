"""What one more row in a step costs on this machine: by that trees pay or do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NEAR = 16  # rows more than the smallest step: as many as small trees have


@dataclass(frozen=True)
class RowCost:
    """What steps cost, by those of few rows.

    Attributes:
        tokens: rows of the smallest step known.
        step: its seconds.
        row: seconds of each row more.
    """

    tokens: int
    step: float
    row: float

    @property
    def share(self) -> float:
        """A row more, over the smallest step: a node pays if it is accepted more often than that."""
        return self.row / self.step

    @property
    def words(self) -> str:
        """In one sentence.

        >>> RowCost(1, 0.020, 0.001).words
        'A step of 1 row takes 20.0 ms here, each row more 1.00 ms (5 %): nodes pay if over 5 in 100 are accepted.'
        """
        rows = f"{self.tokens} row{'' if self.tokens == 1 else 's'}"
        return (
            f"A step of {rows} takes {1e3 * self.step:.1f} ms here, each row more {1e3 * self.row:.2f} ms "
            f"({self.share:.0%}): nodes pay if over {100 * self.share:.0f} in 100 are accepted."
        ).replace("%)", " %)")


def row_cost(seconds: Mapping[int, float]) -> RowCost | None:
    """From the learnt times of steps; None before two sizes are known.

    Args:
        seconds: by the tokens of a step.

    >>> row_cost({1: 0.020, 9: 0.028, 128: 0.5})
    RowCost(tokens=1, step=0.02, row=0.001)
    """
    sizes = sorted(size for size, value in seconds.items() if value > 0)
    if len(sizes) < 2:
        return None
    few = sizes[0]
    near = [size for size in sizes[1:] if size <= few + NEAR] or sizes[1:2]
    more = near[-1]
    row = max(0.0, (seconds[more] - seconds[few]) / (more - few))
    return RowCost(few, seconds[few], round(row, 9))
