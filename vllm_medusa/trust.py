"""How much of what drafts promise comes true: for each request, and for each kind of request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.cost import FADING, faded

Floats = npt.NDArray[np.float32]

MEMORY = 512.0  # promised tokens over which a kind's trust is a mean
OWN_MEMORY = 64.0  # the same of one request
DOUBT = 32.0  # promised tokens that are taken for granted at first
KIND = 8.0  # promised tokens of a request's own that count as much as what is known of its kind
LEFT = 2.0  # promised tokens that a kind's trust still stands for when all of it has faded
LEAST_TRUST, MOST_TRUST = 0.05, 1.25
KINDS = 5  # temperatures 0, 0.5, 1, 1.5, and 2 or more, rounded
COOLING = 0.8  # see `at_temperature`


class Trust:
    """Accepted nodes over the sum of their probabilities.

    Heads without calibration, of another model or at another temperature promise what they do not keep. Drafting by
    what they keep, speculation shrinks to what pays, down to nothing. What was seen fades with time, not in its share
    but in its weight: where hardly anything is drafted, a few tries tell whether that is still right.

    >>> trust = Trust()
    >>> trust.learn(promised=96.0, accepted=32.0)
    >>> trust.share
    0.5
    """

    def __init__(self) -> None:
        """Believe every word, for now."""
        self._promised = self._accepted = DOUBT
        self._at = 0.0  # when it learnt last

    def learn(self, promised: float, accepted: float, now: float = 0.0) -> None:
        """Count nodes: the sum of their probabilities, and how many were accepted, at `now` seconds of serving."""
        left = 1.0
        if now > self._at:
            left = max(faded(now - self._at), min(LEFT / self._promised, 1.0))
            self._at = now
        self._promised = left * self._promised + promised
        self._accepted = left * self._accepted + accepted
        if self._promised > MEMORY:
            self._accepted *= MEMORY / self._promised
            self._promised = MEMORY

    @property
    def share(self) -> float:
        """What a promised token is worth, LEAST_TRUST to MOST_TRUST."""
        return min(max(self._accepted / self._promised, LEAST_TRUST), MOST_TRUST)


class Trusts:
    """The trust of every request. One of which little is known is thought to be like its kind.

    A request's kind is its temperature, rounded to halves. Half of an engine's requests may repeat a list, the others
    make things up: each gets what it deserves.

    Attributes:
        every: of all requests together.
    """

    def __init__(self) -> None:
        """Nothing has been promised."""
        self.every = Trust()
        self._kinds = [Trust() for _ in range(KINDS)]
        self._shares = np.ones(KINDS)  # of each kind
        self._places: dict[str, int] = {}  # of each request, in the array
        self._own = np.zeros((16, 4))  # promised, accepted, when that was, kind
        self._free = list(range(16))

    def add(self, request: str, temperature: float) -> None:
        """A request begins; one that is known stays."""
        if request in self._places:
            return
        if not self._free:
            count = len(self._own)
            self._own = np.concatenate((self._own, np.zeros_like(self._own)))
            self._free = list(range(count, 2 * count))
        self._places[request] = place = self._free.pop()
        self._own[place] = 0.0, 0.0, 0.0, min(round(2.0 * temperature), KINDS - 1)

    def learn(self, requests: Sequence[str], promised: Floats, accepted: Floats, now: float) -> None:
        """Count one step; arguments by request, `now` as in `Trust.learn`. Requests that ended are nobody's."""
        known = [(self._places[request], row) for row, request in enumerate(requests) if request in self._places]
        if not known:
            return
        places, rows = np.array(known).T
        new = np.stack((promised, accepted), axis=1)[rows]
        sums: dict[float, list[float]] = {}
        for kind, (promise, kept) in zip(self._own[places, 3].tolist(), new.tolist(), strict=True):
            of_kind = sums.setdefault(kind, [0.0, 0.0])
            of_kind[0] += promise
            of_kind[1] += kept
        for kind, (promise, kept) in sums.items():
            if promise > 0.0:
                self._kinds[int(kind)].learn(promise, kept, now)
                self._shares[int(kind)] = self._kinds[int(kind)].share
                self.every.learn(promise, kept, now)
        own = self._own[places, :2] * self._left(places, now) + new
        self._own[places, :2] = own * (OWN_MEMORY / np.maximum(own[:, :1], OWN_MEMORY))
        self._own[places, 2] = now

    def shares(self, requests: Sequence[str], now: float) -> Floats:
        """float32 [B], what a promised token of each request is worth."""
        places = [self._places[request] for request in requests]
        of_kind = self._shares[self._own[places, 3].astype(np.int64)]
        promised, accepted = (self._own[places, :2] * self._left(places, now)).T
        shares = (accepted + KIND * of_kind) / (promised + KIND)
        return np.asarray(shares.clip(LEAST_TRUST, MOST_TRUST), dtype=np.float32)

    def forget(self, requests: Iterable[str]) -> None:
        """Drop requests that ended."""
        for request in requests:
            place = self._places.pop(request, None)
            if place is not None:
                self._free.append(place)

    def __len__(self) -> int:
        return len(self._places)

    def _left(self, places: Any, now: float) -> npt.NDArray[np.float64]:
        """float64 [B, 1], what has not faded of what these requests have shown."""
        return np.asarray(0.5 ** ((now - self._own[places, 2:3]) / FADING))


def at_temperature(reach: Floats, temperatures: npt.ArrayLike) -> Floats:
    """What is left of probabilities, calibrated on the likeliest token, where tokens are drawn at a temperature.

    Sure things stay nearly sure, the others lose the more the deeper they lie. COOLING is a first guess, from 20
    MT-Bench prompts at 0.7 and 1.0 with the bundled heads; trust learns the rest.

    Args:
        reach: float32 [B, N].
        temperatures: [B].

    >>> at_temperature(np.array([[0.9, 0.3], [0.9, 0.3]], dtype=np.float32), [0.0, 1.0]).round(2).tolist()
    [[0.8999999761581421, 0.30000001192092896], [0.8299999833106995, 0.10999999940395355]]
    """
    exponents = 1.0 + COOLING * np.square(np.asarray(temperatures, dtype=np.float32))
    return np.asarray(np.power(reach, exponents[:, None]), dtype=np.float32)
