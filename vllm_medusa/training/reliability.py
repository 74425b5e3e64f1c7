"""Whether probabilities mean what they say: said against right, in bins."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Candidates sorted into 15 bins of equal width by the probability they were given.

    Attributes:
        count: int64 [15], candidates in each bin.
        said: float64 [15], their mean probability; 0 in empty bins.
        right: float64 [15], the share of them that was right; 0 in empty bins.
    """

    count: npt.NDArray[np.int64]
    said: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean of |said - right|, each bin weighted by its probability in all."""
        mass = self.said * self.count
        return float((np.abs(self.said - self.right) * mass).sum() / max(float(mass.sum()), 1e-9))

    def table(self) -> list[dict[str, float]]:
        """One row per bin that is not empty."""
        rows = zip(self.count.tolist(), self.said.tolist(), self.right.tolist(), strict=True)
        return [{"candidates": n, "said": round(said, 5), "right": round(right, 5)} for n, said, right in rows if n]


def reliability_of(said: npt.NDArray[np.float32], right: npt.NDArray[np.bool_]) -> Reliability:
    """Bins of n candidates: the probability said [n] of each, and whether it was right [n].

    >>> bins = reliability_of(np.array([0.5, 0.5], dtype=np.float32), np.array([True, False]))
    >>> bins.error, bins.table()
    (0.0, [{'candidates': 2, 'said': 0.5, 'right': 0.5}])
    """
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    each = np.maximum(count, 1)
    return Reliability(count, np.bincount(bins, said, BINS) / each, np.bincount(bins, right, BINS) / each)
