"""Time as a schedule says it, so that what the product learns from it repeats."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np


class ScriptedClock:
    """Stands where the product's modules have `time`: each look takes a little, each step what a schedule says."""

    def __init__(self, seed: int, step: float, token: float) -> None:
        """`step`, `token`: milliseconds."""
        self._rng = np.random.default_rng([23, seed])
        self._now, self._pending = 1000.0, 0.0
        self._step, self._token = step / 1000, token / 1000

    def step_of(self, tokens: int) -> None:
        """A step of so many tokens begins: it has taken its time when somebody looks for the third time."""
        self._looks, self._pending = 0, (self._step + self._token * tokens) * float(self._rng.lognormal(0.0, 0.2))

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens takes."""
        return self._step + self._token * tokens

    def perf_counter(self) -> float:
        """As `time.perf_counter`."""
        self._looks = getattr(self, "_looks", 0) + 1
        self._now += 1e-5
        if self._looks == 3:
            self._now += self._pending
            self._pending = 0.0
        return self._now

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self._now

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of `time` is the real one's."""
        return getattr(time, name)

    def rule(self, stack: ExitStack) -> None:
        """From now on the product looks at this clock, until the stack unwinds."""
        from vllm_medusa.host import scheduler, statistics
        from vllm_medusa.host.v1 import drafting, runner

        for module in (scheduler, statistics, drafting, runner):
            stack.callback(setattr, module, "time", module.time)
            module.time = self
