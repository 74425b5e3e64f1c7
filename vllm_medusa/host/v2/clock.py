"""Seconds of a step's stages on Model Runner V2: marks on the device's own stream, read once it has passed them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

About = TypeVar("About")


class StageClock(Generic[About]):
    """Marks the stages of steps, and tells their seconds some steps later; nothing waits for the device.

    What the host does between two steps, while the device may have nothing to do, belongs to neither.
    """

    def __init__(self, device: torch.device) -> None:
        """Time what runs on the current stream of `device`; on a CPU, what runs."""
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._waiting: deque[tuple[About, list[tuple[str, Any]]]] = deque()

    def begin(self) -> None:
        """A step begins; one that was never ended is forgotten."""
        self._marks = [("", self._now())]

    def mark(self, stage: str) -> None:
        """What was enqueued since the last mark is this stage of the step; "": none of them."""
        if self._marks:
            self._marks.append((stage, self._now()))

    def end(self, about: About | None) -> None:
        """The step is enqueued to its end.

        Args:
            about: told with its seconds; None: they tell nothing, so forget them.
        """
        self.mark("")
        if about is not None and self._marks:
            self._waiting.append((about, self._marks))
        self._marks = []

    def finished(self) -> Iterator[tuple[About, dict[str, float]]]:
        """Steps that are through, oldest first: what `end` was told, and seconds by stage and of the whole "step"."""
        while self._waiting and self._passed(self._waiting[0][1][-1][1]):
            about, marks = self._waiting.popleft()
            seconds = {"step": self._between(marks[0][1], marks[-1][1])}
            for (_, before), (stage, after) in pairwise(marks):
                if stage:
                    seconds[stage] = seconds.get(stage, 0.0) + self._between(before, after)
            yield about, seconds

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _passed(self, mark: Any) -> bool:
        return self._device.type == "cpu" or bool(mark.query())

    def _between(self, before: Any, after: Any) -> float:
        if self._device.type == "cpu":
            return float(after - before)
        return float(before.elapsed_time(after)) / 1e3  # it says milliseconds
