"""The benchmarks of heads run, on next to nothing, and print tables."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def test_time_of_the_heads(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # other tests keep theirs
    script = repository / "benchmarks" / "heads_time.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--hidden", "32", "--vocab", "8192", "--repeats", "2"])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 3 and all(line.count("|") == 6 for line in lines)


def test_memory_of_training(repository: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = runpy.run_path(str(repository / "benchmarks" / "training_memory.py"))
    names["measure"].__globals__["VOCAB"] = 2048
    names["write_rows"](tmp_path, 400)
    found = names["measure"](names["Case"](tmp_path, "mixed", 1, 512))
    assert (found.rows, found.steps) == (480, 1)
    assert found.start > 0 and 0 < found.opened <= found.peak


def test_speed_of_training(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    script = repository / "benchmarks" / "training_speed.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "1", "--draft-vocab", "256"])
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert found["processes"] == 1 and found["rows_per_second"] > 0
