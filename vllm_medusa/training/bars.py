"""Progress bars with the time left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, name: str) -> Iterator[tuple[Progress, Any]]:
    """A bar called `name`, gone when the block ends; yields the display and the bar's task for updates."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        yield bars, bars.add_task(name, total=None)
