"""The command line: its help tells the truth, and what users can mend is one message without a traceback."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_medusa.cli import app
from vllm_medusa.defaults import bundled_heads

runner = CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"})


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__name__ in result.output


@pytest.mark.parametrize("command", [c.callback.__name__ for c in app.registered_commands if c.callback])
def test_each_command_has_help(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", [None, *(c.callback.__name__ for c in app.registered_commands if c.callback)])
def test_pages_read_well(command: str | None, width: int) -> None:
    """No line is too long, no word is broken, none is left out, and what is said about an option has room."""
    arguments = [command, "--help"] if command else ["--help"]
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= min(width, 100), max(lines, key=len)
    assert "…" not in result.output and "│" not in result.output
    shown = result.output.split()
    if command is None:
        return
    page = result.output
    (function,) = [c.callback for c in app.registered_commands if c.callback and c.callback.__name__ == command]
    for name, parameter in inspect.signature(function).parameters.items():
        (*_, info) = typing.get_args(typing.get_type_hints(function, include_extras=True)[name])
        assert info.help, f"{name} says nothing of itself"
        words = iter(shown)
        assert all(word in words for word in info.help.split()), f"{name}: {info.help}"
        if isinstance(parameter.default, int | float | str) and not isinstance(parameter.default, bool):
            assert f"[default: {parameter.default}]" in page, f"{name}: no default, or one that is cut"
    options = next(place for place, line in enumerate(lines) if line == "Options:")
    about = [line[28:] for line in lines[options + 1 :] if line.startswith(" " * 28)]
    assert len(about) < 5 or sum(map(len, about)) / len(about) > 15, "two words a line"
    for literal in ("auto|bfloat16|float16|float32",) if command in ("demo", "bench") else ():
        assert literal in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--methods", "eagle"], "methods='eagle'"),
        (["bench", "--batch-sizes", "1,0"], "batch-sizes='1,0'"),
        (["bench", "--batch-sizes", "four"], "batch-sizes='four'"),
        (["bench", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["bench", "--methods", "ngram", "--show-cost"], "methods='ngram'"),
        (["bench", "--plot", "all.gif"], "all.gif"),
        (["bench", "--methods", "native-chain", "--model", "."], "name plain ones"),
        (["inspect", "--heads", "nothing"], "nothing"),
        (["inspect", "nothing"], "nothing"),
        (["inspect", "one", "--heads", "two"], "named twice"),
        (["inspect", "--plot", "tree.gif"], "tree.gif"),
        (["convert", "nothing", "new", "--to", "ours"], "nothing"),
        (["calibrate", "--heads", "nothing", "--prompts", "p.jsonl", "--model", "."], "nothing"),
        (["calibrate", "--heads", "nothing", "--prompts", "p.jsonl", "--out", "all.gif"], "all.gif"),
    ],
)
def test_errors_are_readable(arguments: list[str], says: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_medusa.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_convert_and_inspect_work_together(tmp_path: Path) -> None:
    """The bundled heads copied by `convert`, then shown and drawn by `inspect`."""
    source = str(bundled_heads())
    result = runner.invoke(app, ["convert", source, str(tmp_path / "copy"), "--to", "ours"])
    assert result.exit_code == 0 and "bit by bit" in result.output
    weights = "model.safetensors"
    assert (tmp_path / "copy" / weights).read_bytes() == (bundled_heads() / weights).read_bytes()
    result = runner.invoke(app, ["inspect", str(tmp_path / "copy"), "--plot", str(tmp_path / "tree.svg")])
    assert result.exit_code == 0 and "tokens per step" in result.output
    assert (tmp_path / "tree.svg").read_text().startswith("<?xml")
