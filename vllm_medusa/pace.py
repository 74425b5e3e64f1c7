"""What makes the same step slow at times: the machine's pace, and the keys that the step has to read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

STALL = 1.25  # a step that took longer than this times the expected says nothing about the work
LEAP = 8.0  # nor does the pace change by more at once
NOISE = 0.1**2  # variance of a step's seconds over the expected
WANDER = 0.036**2  # by how much the variance of the pace grows from step to step; 0.3 of a surprise is laid to it
FIRST_DOUBT = 0.3 * NOISE  # variance of the pace before anything was served
KEYS_OF_A_STEP = 4096  # as many keys may well take as long as a step without any: the first guess is 0, give or take
DRIFT = 0.003  # of that guess: by how much what a key takes may change from step to step


@dataclass
class Pace:
    """The pace, and seconds by key, learnt from steps: a Kalman filter over three numbers.

    A step is expected to take pace * (own + by_key * keys + by_node_key * node_keys) seconds. A request with a long
    text and a machine with a slow minute look alike in one step; but keys are known, a text stays what it is, and a
    machine does not. So a surprise is laid to what is known least: to keys at first, to the pace for good.

    Attributes:
        value: what steps lately took, over what they were expected to take.
        by_key: seconds for each key that a request's root reads.
        by_node_key: seconds for each key that a node reads.
    """

    value: float = 1.0
    by_key: float = 0.0
    by_node_key: float = 0.0
    _variance: list[float] = field(default_factory=lambda: [FIRST_DOUBT, 0.0, 0.0])  # of the three
    _shared: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # pace and key, pace and node key, both keys

    def of_keys(self, keys: float, node_keys: float) -> float:
        """Seconds that reading takes, at the usual pace."""
        return self.by_key * keys + self.by_node_key * node_keys

    def learn(self, seconds: float, own: float, keys: float, node_keys: float) -> float:
        """Learn from a step; returns its seconds without the surprise that a stall would be.

        Args:
            seconds: that it took.
            own: that its tokens take at the usual pace, without any key.
            keys, node_keys: that it read.
        """
        usual = own + self.of_keys(keys, node_keys)
        by, by_node = keys / usual, node_keys / usual
        (p, a, b), (pa, pb, ab) = self._variance, self._shared
        p += WANDER
        if keys or node_keys:
            guess = (own / KEYS_OF_A_STEP) ** 2
            a, b = (a + DRIFT**2 * guess, b + DRIFT**2 * guess / 4.0) if a else (guess, guess / 4.0)
        unknown = math.sqrt(max(by * by * a + 2.0 * by * by_node * ab + by_node * by_node * b, 0.0))
        surprise = max(min(seconds / (self.value * usual), STALL + 3.0 * unknown), 1.0 / LEAP) - 1.0
        # What each of the three has to do with the step's seconds, then how much of the surprise is laid to it.
        of_p, of_a, of_b = p + pa * by + pb * by_node, pa + a * by + ab * by_node, pb + ab * by + b * by_node
        total = of_p + of_a * by + of_b * by_node + NOISE
        gain_p, gain_a, gain_b = of_p / total, of_a / total, of_b / total
        bounded = self.value * usual * (1.0 + surprise)
        self.value *= (1.0 + surprise) ** gain_p
        self.by_key = max(self.by_key + gain_a * surprise, 0.0)
        self.by_node_key = max(self.by_node_key + gain_b * surprise, 0.0)
        self._variance = [p - gain_p * of_p, a - gain_a * of_a, b - gain_b * of_b]
        self._shared = [pa - gain_p * of_a, pb - gain_p * of_b, ab - gain_a * of_b]
        return bounded
