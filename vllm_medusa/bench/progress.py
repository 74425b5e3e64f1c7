"""What a bench tells of itself while engines start and prompts run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console

from vllm_medusa.bench.starting import what_starts
from vllm_medusa.progress import Stage, stage

Watch = Callable[[dict[str, Any]], None]


class BenchProgress:
    """On `console`: each engine that starts and what it does, then all prompts and the time that remains.

    Use it as a context manager.
    """

    def __init__(self, console: Console) -> None:
        """Bars in a terminal, lines elsewhere."""
        self._console = console
        self._stack = ExitStack()
        self._all: Stage | None = None
        self._done = 0

    def __enter__(self) -> BenchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def starting(self, name: str) -> Iterator[Callable[[Any], Watch]]:
        """While an engine starts: yields what makes a watch of the engine, once there is one."""
        engines: list[Any] = []
        with stage(self._console, f"starting {name}", lambda: what_starts(engines[0].log) if engines else None) as now:

            def watch(engine: Any) -> Watch:
                engines.append(engine)
                return lambda message: now.update(message["text"])

            yield watch

    @contextmanager
    def doing(self, name: str) -> Iterator[Stage]:
        """While something else takes its time."""
        with stage(self._console, name) as now:
            yield now

    def expect(self, prompts: int) -> None:
        """The number of prompts to come, over all methods and rounds."""
        self._all = self._stack.enter_context(stage(self._console, "measuring"))
        self._all.update(total=prompts)

    @contextmanager
    def running(self, text: str, prompts: int) -> Iterator[Watch]:
        """While one run goes over `prompts` prompts."""
        assert self._all is not None, "expect comes first"
        overall = self._all
        overall.name = f"measuring {text}"

        def watch(message: dict[str, Any]) -> None:
            overall.update(done=self._done + message["finished"])

        yield watch
        self._done += prompts
        overall.update(done=self._done)
