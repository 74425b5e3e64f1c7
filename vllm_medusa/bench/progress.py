"""Progress bars for the minutes in which engines start and prompts run."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Watch = Callable[[dict[str, Any]], None]

# A warm start on two cores, in seconds: the first engine's time left is judged by it, each later one by its forerunner.
EXPECTED_START_SECONDS = 40.0


class BenchProgress:
    """Bars on `console`: one for engines that start, one for all prompts with the time that remains."""

    def __init__(self, console: Console) -> None:
        """Bars that vanish when done; nothing is drawn when `console` is not a terminal."""
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._last_start = EXPECTED_START_SECONDS
        self._all: Any = None
        self._done = 0

    def __enter__(self) -> "BenchProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def starting(self, name: str) -> Iterator[Watch]:
        """While an engine starts. The time left is judged by how long the last one took."""
        expected = self._last_start
        task = self._bars.add_task(f"{name}: starting", total=expected)
        began = time.monotonic()
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(0.25):
                self._bars.update(task, completed=min(time.monotonic() - began, 0.97 * expected))

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield lambda message: self._bars.update(task, description=f"{name}: {message['text']}")
        finally:
            ended.set()
            ticker.join()
            self._bars.remove_task(task)
        self._last_start = time.monotonic() - began

    def expect(self, prompts: int) -> None:
        """The number of prompts to come, over all methods and rounds."""
        self._all = self._bars.add_task("prompts", total=prompts)

    @contextmanager
    def running(self, text: str, prompts: int) -> Iterator[Watch]:
        """While one run goes over `prompts` prompts."""
        self._bars.update(self._all, description=text)

        def watch(message: dict[str, Any]) -> None:
            self._bars.update(self._all, completed=self._done + message["finished"])

        yield watch
        self._done += prompts
        self._bars.update(self._all, completed=self._done)
