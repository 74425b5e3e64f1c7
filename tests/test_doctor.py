"""Doctor's report, its exit status and its self-check; test_doctor_traps.py has what it looks at."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_medusa.cli import app
from vllm_medusa.defaults import bundled_heads
from vllm_medusa.doctor import report, self_check
from vllm_medusa.doctor.finding import Finding
from vllm_medusa.doctor.self_check import judge, run_self_check

LONG = os.environ.get("MEDUSA_LONG") == "1"


def answer(**changes: Any) -> dict[str, Any]:
    """What a good child says, but for this."""
    good = {"plain": [[1, 2, 3]] * 2, "trees": [[1, 2, 3]] * 2, "mean_accepted_length": 2.5, "drafted_nodes": 9}
    return good | {"kernel": "c++"} | changes


@pytest.mark.parametrize(
    ("said", "state", "detail"),
    [
        (answer(), "ok", "6 tokens of 2 requests, the same as plain vLLM's; 2.5 tokens a step"),
        (answer(trees=[[1, 2, 3], [1, 9, 3]]), "bad", "request 2, token 2"),
        (answer(trees=[[1, 2], [1, 2, 3]]), "bad", "request 1, token 3"),
        (answer(mean_accepted_length=1.0), "bad", "no drafted token was accepted"),
        (answer(drafted_nodes=0), "bad", "no drafted token was accepted"),
        ({"error": "RuntimeError: " + "long " * 500 + "story"}, "bad", "RuntimeError: long"),
    ],
)
def test_what_an_answer_means(said: dict[str, Any], state: str, detail: str) -> None:
    found = judge(said, 9.0)
    assert found.state == state and detail in found.detail and len(found.detail) < 600


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("echo about to crash >&2; kill -SEGV $$", "ended by SIGSEGV: about to crash"),
        ("kill -ILL $$", "ended by SIGILL"),
        ("echo 'ImportError: no vllm' >&2; exit 3", "status 3: ImportError: no vllm"),
        ("exit 0", "status 0"),
        ("sleep 60 & sleep 60", "no answer after 1 seconds"),
    ],
)
def test_a_child_that_does_not_answer_is_a_finding(
    script: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does; and nothing of it is left."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (found,) = run_self_check(1.0)
    assert found.state == "bad" and detail in found.detail and found.advice, found
    group, end = int((tmp_path / "pid").read_text()), time.monotonic() + 5.0
    while members(group) and time.monotonic() < end:  # killed, but not gone yet
        time.sleep(0.01)
    assert not members(group)


def members(group: int) -> list[str]:
    """Processes of a group that are alive."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, facts = file.read_text().rpartition(") ")
            state, _, in_group = facts.split()[:3]
            if int(in_group) == group and state != "Z":
                found.append(name)
    return found


@pytest.mark.slow
def test_the_self_check_serves() -> None:
    """The real thing: trees accepted, the same tokens; this process stays as it was."""
    before = dict(os.environ), set(sys.modules)
    (found,) = run_self_check(200.0)
    assert found.state == "ok" and "96 tokens of 4 requests" in found.detail, found
    accepted = float(found.detail.split("; ")[1].split()[0])
    assert accepted > 3.0, "planted heads are right on nearly every row"
    assert (dict(os.environ), set(sys.modules)) == before


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="MEDUSA_LONG=1: half a minute")
def test_the_self_check_asks_vllm_about_a_pair(tmp_path: Path) -> None:
    """One that it takes, one that it does not."""
    from vllm_medusa.doctor.tiny_pair import write_pair

    model, heads = write_pair(tmp_path)
    pair, found = run_self_check(200.0, str(model), str(heads))
    assert (pair.state, found.state) == ("ok", "ok"), (pair, found)
    pair, found = run_self_check(200.0, str(model), str(bundled_heads()))
    assert (pair.state, found.state) == ("bad", "ok") and "hidden_size=576" in pair.detail, (pair, found)


def shown(findings: list[Finding], monkeypatch: pytest.MonkeyPatch, *arguments: str, width: str = "80") -> Any:
    """The command's result where these are all findings."""
    checks = tuple((lambda finding=finding: finding) for finding in findings)
    for check in checks:
        check.__name__ = "check_something"
    monkeypatch.setattr(report, "CHECKS", checks)
    monkeypatch.setattr(report, "check_pair", lambda *_: [])
    return CliRunner(env={"COLUMNS": width}).invoke(app, ["doctor", "--no-self-check", *arguments])


GOOD, NOTE, BAD = (
    Finding("one", "ok", "fine"),
    Finding("two", "note", "well", "do"),
    Finding("three", "bad", "no", "do"),
)


def test_the_exit_status_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown([GOOD, NOTE], monkeypatch, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0 and "Medusa can serve here; 2 notes" in result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["can_serve"] is True
    assert content["findings"][1] == {"subject": "two", "state": "note", "detail": "well", "advice": "do"}
    result = shown([GOOD, BAD], monkeypatch, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1 and "cannot serve here: 1 fault" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["can_serve"] is False


def test_figures_that_cannot_be_written_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = shown([GOOD], monkeypatch, "--json", str(tmp_path))
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and "json=" in result.stderr


def test_a_pipe_gets_whole_lines_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Finding("four", "note", "word " * 60 + "end", "advice " * 40 + "end")
    result = shown([long], monkeypatch)
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("• four ") and lines[0].endswith("end") and lines[1].strip().startswith("-> advice")


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_gets_lines_that_fit(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    long = Finding("tree attention", "bad", "word " * 60, "advice " * 40)
    console = Console(width=width, force_terminal=True, color_system=None, legacy_windows=False)
    report._show(console, long)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines) and max(map(len, lines)) > width - 15
    assert all(line.startswith(" " * 18) for line in lines[1:])


def test_a_check_that_cannot_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken() -> Finding:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(report, "CHECKS", (check_broken,))
    monkeypatch.setattr(report, "check_pair", lambda *_: [])
    result = CliRunner().invoke(app, ["doctor", "--no-self-check"])
    assert result.exit_code == 1 and "RuntimeError: no such thing" in result.output


def test_what_would_fail_anyway_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CHECKS", (lambda: Finding("plugin", "bad", "hidden"),))
    monkeypatch.setattr(report, "check_pair", lambda *_: [])
    monkeypatch.setattr(report, "run_self_check", lambda *_: pytest.fail("tried"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "left out" in result.output


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="MEDUSA_LONG=1: half a minute each")
@pytest.mark.parametrize(("plugins", "status"), [(None, 0), ("other", 1)])
def test_the_whole_command(plugins: str | None, status: int, tmp_path: Path) -> None:
    """As users run it: everything looked at, in an environment that serves and one that does not."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environment |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    command = [sys.executable, "-m", "vllm_medusa.cli", "doctor", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr == "" and "\x1b" not in done.stdout
    states = {found["subject"]: found["state"] for found in json.loads((tmp_path / "out.json").read_text())["findings"]}
    assert states["vLLM"] == states["host contract"] == states["bundled heads"] == "ok"
    assert (states["plugin"], states["self-check"]) == (("ok", "ok") if status == 0 else ("bad", "note"))


def test_doctor_is_light_until_it_looks() -> None:
    """Importing it loads neither torch nor vLLM."""
    code = "import sys, vllm_medusa.commands.doctor; print([n for n in ('torch', 'vllm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert importlib.util.find_spec("vllm_medusa.doctor.child") is not None and self_check.SUBJECT == "self-check"
