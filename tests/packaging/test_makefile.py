"""The Makefile's promises that can be checked without installing two gigabytes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(repository / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    environment.pop("MAKEFLAGS", None)  # these tests may run under make themselves
    command = [shutil.which("make") or "make", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_help_names_the_targets(checkout: Path) -> None:
    shown = make(checkout, "help").stdout
    for target in (
        "demo",
        "test",
        "test-fast",
        "test-long",
        "check",
        "coverage",
        "heads",
        "bench",
        "gpu-check",
        "gpu-e2e",
        "clean",
    ):
        assert f"make {target} " in shown


def test_no_python_is_one_readable_error(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "echo", "rm"):
        (tools / name).symlink_to(shutil.which(name) or name)
    result = make(checkout, "venv", path=str(tools))
    assert result.returncode != 0
    assert "no Python 3.11, 3.12 or 3.13 found" in result.stderr
    assert not (checkout / ".venv").exists()


def test_stale_when_the_project_file_changes(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert make(checkout, "-q", "venv").returncode == 0
    newer = stamp.stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (newer, newer))
    assert make(checkout, "-q", "venv").returncode == 1


def test_demo_passes_the_json_file_on(checkout: Path) -> None:
    assert "--json 'out.json'" in make(checkout, "-n", "demo", "JSON=out.json").stdout


def test_bench_measures_vllms_own_medusa_with_heads_it_can_serve(checkout: Path) -> None:
    shown = make(checkout, "-n", "bench").stdout
    assert "--batch-sizes 1,2,4,8,16,32" in shown and "native" not in shown
    shown = make(checkout, "-n", "bench", "NATIVE_HEADS=plain").stdout
    assert "medusa-chain,native-chain,ngram" in shown and "--native-heads 'plain'" in shown


def test_heads_are_made_by_one_command_that_says_how_long_it_takes(checkout: Path) -> None:
    shown = make(checkout, "-n", "heads", "DATA=files", "ARGS=--seed 3").stdout.replace("\\\n", " ")
    told, command = shown.index("About two hours"), shown.index("vllm-medusa train")
    assert told < command
    words = shown[command:].split()
    for option, value in (("--prompts", "files/train_prompts.jsonl"), ("--self-prompts", "6000"), ("--seed", "3")):
        assert words[words.index(option) + 1] == value
    assert [word for word in words if word.startswith("files/")][1:] == [
        f"files/{name}.jsonl" for name in ("mt_bench", "humaneval", "gsm8k")
    ]


def test_coverage_is_that_of_the_fast_tests(checkout: Path) -> None:
    shown = make(checkout, "-n", "coverage", "ARGS=-x").stdout
    assert "not slow and not server and not gpu" in shown and "--cov" in shown and "-x" in shown


def test_the_gpu_check_needs_nothing_installed(checkout: Path) -> None:
    shown = make(checkout, "-n", "--no-print-directory", "gpu-check", "PYTHON=python9", "ARGS=--interpret").stdout
    assert shown.split() == ["python9", "benchmarks/gpu_check.py", "--interpret"]


def test_ci_runs_check_and_test(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make check test")
