"""Where a long command is: bars in a terminal, elsewhere a line at each stage and every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between two lines where there is no terminal
LOOK_SECONDS = 1.0  # between two looks at what a stage does by itself
_open: dict[int, _Display] = {}  # by the console's identity, while a stage runs on it


class Stage:
    """Something that takes long; made by `stage`."""

    def __init__(self, display: _Display, name: str, look: Callable[[], str | None] | None) -> None:
        """See `stage`."""
        self.name, self.text, self.look = name, "", look
        self.done: float | None = None
        self.total: float | None = None
        self.began = time.monotonic()
        self._display = display

    def update(self, text: str | None = None, done: float | None = None, total: float | None = None) -> None:
        """Tell where it is.

        Args:
            text: what it does now; a new one is a stage of its own and told at once.
            done, total: how much of it is done, and in all.
        """
        new = text is not None and text != self.text
        self.text = self.text if text is None else text
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self._display.show(self, new)

    def describe(self) -> str:
        """In one line: its name, what it does, how far it is, how long it has taken and may take.

        >>> waiting = Stage(_Silent(), "answering", None)
        >>> waiting.update("prompt 3", done=3, total=12)
        >>> waiting.describe()
        'answering: prompt 3, 3 of 12, 0:00'
        """
        took = time.monotonic() - self.began
        parts = [f"{self.name}: {self.text}" if self.text else self.name]
        if self.total:
            parts.append(f"{self.done or 0:,.0f} of {self.total:,.0f}")
        parts.append(_clock(took))
        if self.total and self.done and took > LINE_SECONDS / 2:
            parts.append(f"about {_clock(took * (self.total - self.done) / self.done)} left")
        return ", ".join(parts)


@contextmanager
def stage(console: Console, name: str, look: Callable[[], str | None] | None = None) -> Iterator[Stage]:
    """While something takes long. Stages may begin inside others on the same console.

    Args:
        console: where it is told; nothing is told on a quiet one.
        name: of the stage, such as "training".
        look: asked now and then what it does; None as its answer: nothing new.
    """
    display = _open.get(id(console))
    outermost = display is None
    if display is None:
        display = _open[id(console)] = _display_of(console)
    now = Stage(display, name, look)
    display.begin(now)
    try:
        yield now
    finally:
        display.end(now)
        if outermost:
            del _open[id(console)]
            display.close()


class _Display:
    """What stages are shown on. A thread looks after the innermost one."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, stage: Stage) -> None:
        self.stages.append(stage)
        self.show(stage, True)

    def end(self, stage: Stage) -> None:
        self.stages.remove(stage)

    def show(self, stage: Stage, new: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            for stage in self.stages[-1:]:
                text = stage.look() if stage.look is not None else None
                stage.update(text or None)


class _Silent(_Display):
    def __init__(self) -> None:
        self.stages = []

    def show(self, stage: Stage, new: bool) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines(_Display):
    """For files, pipes and the logs of CI."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._told = 0.0
        super().__init__()

    def show(self, stage: Stage, new: bool) -> None:
        with self._lock:
            if not new and time.monotonic() - self._told < LINE_SECONDS:
                return
            self._told = time.monotonic()
            self._console.print(f"... {stage.describe()}", soft_wrap=True, highlight=False, markup=False)
            self._console.file.flush()


class _Bars(_Display):
    """For terminals: a bar for each stage, gone when it ends."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bars = Progress(*columns, *times, console=console, transient=True)
        self._tasks: dict[int, Any] = {}
        self._bars.start()
        super().__init__()

    def begin(self, stage: Stage) -> None:
        self._tasks[id(stage)] = self._bars.add_task(stage.name, total=None)
        super().begin(stage)

    def end(self, stage: Stage) -> None:
        super().end(stage)
        self._bars.remove_task(self._tasks.pop(id(stage)))

    def show(self, stage: Stage, new: bool) -> None:
        task = self._tasks.get(id(stage))
        if task is not None:
            text = f"{stage.name}: {stage.text}" if stage.text else stage.name
            self._bars.update(task, description=text, completed=stage.done, total=stage.total)

    def close(self) -> None:
        super().close()
        self._bars.stop()


def _display_of(console: Console) -> _Display:
    if console.quiet:
        return _Silent()
    return _Bars(console) if console.is_terminal else _Lines(console)


def _clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> _clock(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
