"""Where long commands are: lines that never leave a reader alone for long, bars in terminals."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from vllm_medusa import progress
from vllm_medusa.bench.progress import BenchProgress
from vllm_medusa.bench.starting import what_starts
from vllm_medusa.progress import stage


class Timed(io.StringIO):
    """Remembers when each line came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[float] = []

    def write(self, text: str) -> int:
        self.came += [time.monotonic()] * text.count("\n")
        return super().write(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_line_again_and_again_where_there_is_no_terminal() -> None:
    file = Timed()
    began = time.monotonic()
    with stage(Console(file=file, width=40), "training [1]") as now:
        now.update(done=1, total=4)
        time.sleep(0.8)
        now.update(done=3)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("... training [1], 0:00") and 3 <= len(lines) <= 6
    assert any(re.fullmatch(r"... training \[1\], 1 of 4, 0:0\d(, about 0:0\d left)?", line) for line in lines)
    gaps = [later - before for before, later in zip([began, *file.came], [*file.came, time.monotonic()], strict=True)]
    assert max(gaps) < 0.8, "silent as long as the stage"


@pytest.mark.usefixtures("quick")
def test_each_stage_is_told_at_once_also_inside_another() -> None:
    file = io.StringIO()
    console = Console(file=file)
    with stage(console, "outer"):
        with stage(console, "inner") as now:
            now.update("first")
            now.update("second")
            now.update("second", done=3)
        with stage(console, "last"):
            pass
    told = [line.split(",")[0] for line in file.getvalue().splitlines()]
    assert told == ["... outer", "... inner", "... inner: first", "... inner: second", "... last"]
    assert not progress._open


@pytest.mark.usefixtures("quick")
def test_a_stage_that_is_looked_at() -> None:
    file, said = io.StringIO(), ["loading", "compiling"]
    with stage(Console(file=file), "starting", lambda: said[0]):
        time.sleep(0.3)
        said.pop(0)
        time.sleep(0.3)
    assert "starting: loading" in file.getvalue() and "starting: compiling" in file.getvalue()


@pytest.mark.usefixtures("quick")
def test_bars_in_a_terminal_vanish() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with stage(console, "outer"), stage(console, "inner") as now:
        now.update("deep down", done=1, total=2)
        time.sleep(0.3)
    assert "inner: deep down" in file.getvalue() and "..." not in file.getvalue()


def test_nothing_on_a_quiet_console() -> None:
    file = io.StringIO()
    with stage(Console(file=file, quiet=True), "outer") as now:
        now.update("deep down", done=1, total=2)
    assert file.getvalue() == ""


def test_it_ends_with_an_error() -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError), stage(console, "outer"), stage(console, "inner"):
        raise ValueError
    assert not progress._open


@pytest.mark.usefixtures("quick")
def test_a_bench(tmp_path: Path) -> None:
    """Engines that start, by their log, then one line about all prompts."""

    class Engine:
        log = tmp_path / "log"

    file = io.StringIO()
    with BenchProgress(Console(file=file, width=200)) as told:
        with told.starting("medusa") as watch:
            watch(Engine())({"text": "importing vLLM"})
            Engine.log.write_text("INFO Starting to load model x...\nINFO Loading weights took 1 s\n")
            time.sleep(0.2)
            Engine.log.write_text(Engine.log.read_text() + "INFO Warming up model for the compilation...\n")
            time.sleep(0.2)
        told.expect(8)
        with told.running("medusa on chat", 4) as run:
            run({"finished": 2})
            time.sleep(0.5)
    text = file.getvalue()
    places = [text.index(said) for said in ("importing vLLM", "preparing the weights", "compiling the model")]
    assert places == sorted(places)
    assert "measuring medusa on chat, 2 of 8" in text


def test_what_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert what_starts(log) is None
    log.write_text("INFO nothing of interest\n")
    assert what_starts(log) is None
    log.write_text("Starting to load model a\nWarming up model for the compilation...\nWarming up done.\n")
    assert what_starts(log) == "measuring what steps cost"
