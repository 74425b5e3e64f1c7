"""What may be lost to trying something that does not look best."""

from __future__ import annotations

SHARE = 0.008  # of the time served; what a lucky try brings about for a while costs a little more


class Tries:
    """Time set aside for tries, in seconds: a small share of what serving takes, less than a hundredth.

    What is not tried is not known: nobody sees that heads are right again while nothing is drafted, nor that a size of
    a step is cheap again while none has that size. So tries go on for ever, as often as this pays for what they are
    expected to lose: dear ones seldom, cheap ones often.

    >>> tries = Tries()
    >>> for _ in range(100):
    ...     tries.earn(0.020)
    >>> tries.affords(0.015), tries.affords(0.017)
    (True, False)
    """

    def __init__(self, most: float = 2.0) -> None:
        """Nothing is set aside yet; at most the time of `most` steps ever is."""
        self.saved = 0.0
        self._most = most

    def earn(self, seconds: float) -> None:
        """A step of `seconds` was served."""
        self.saved = min(self.saved + SHARE * seconds, max(self._most * seconds, self.saved))

    def affords(self, loss: float) -> bool:
        """Whether a try may be made that loses `loss` seconds."""
        return loss <= self.saved

    def spend(self, loss: float) -> None:
        """It is made."""
        self.saved -= loss
