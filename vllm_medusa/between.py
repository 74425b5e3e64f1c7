"""What passes between two steps: scheduling, messages between processes, answers on their way to users."""

from __future__ import annotations

RATE = 0.05  # of what is new
STALL = 2.0  # a time longer than this many usual ones counts as so many
FEWEST = 8  # steps after which the mean is believed


class Between:
    """Seconds from the end of a step to the start of the next, a running mean.

    They pass whatever a step holds, so a tree that saves a step saves them too: the longer they are, the more nodes
    pay.

    >>> between = Between()
    >>> for _ in range(8): between.observe(0.01)
    >>> round(between.seconds, 6)
    0.01
    """

    def __init__(self) -> None:
        """Nothing is known, and nothing assumed to pass."""
        self._mean = 0.0
        self._seen = 0

    def observe(self, seconds: float) -> None:
        """Learn from the time between two steps of which the second went on with requests of the first."""
        self._seen += 1
        if self._seen > FEWEST:
            seconds = min(seconds, STALL * self._mean)
        self._mean += max(RATE, 1.0 / self._seen) * (seconds - self._mean)

    @property
    def seconds(self) -> float:
        """The mean; 0 until enough was seen."""
        return self._mean if self._seen >= FEWEST else 0.0
