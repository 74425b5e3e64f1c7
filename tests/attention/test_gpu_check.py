"""`make gpu-check` where there is no GPU: it says so, or checks small cases in the interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script from a folder that holds the repository's files, with nothing of ours installed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, str(folder / "benchmarks" / "gpu_check.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def bare(repository: Path, tmp_path: Path) -> Path:
    """What the check needs of the repository, and no more."""
    for name in ("benchmarks", "vllm_medusa/attention"):
        shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(repository / "vllm_medusa" / "__init__.py", tmp_path / "vllm_medusa")
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(bare: Path) -> None:
    done = check(bare)
    assert done.returncode == 2 and "No GPU here: nothing was checked" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"gpu": None, "checked": False}


def test_small_cases_in_the_interpreter(bare: Path) -> None:
    done = check(bare, "--interpret")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["interpreted"] and report["wrong"] == [] and report["checks"] > 20
    assert 0.0 < report["largest_error_of_allowed"] <= 1.0


@pytest.mark.gpu
def test_large_cases_on_a_gpu(bare: Path) -> None:
    done = check(bare)
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and report["wrong"] == [] and report["checks"] > 40, done.stdout[-2000:]


def test_what_it_is_timed_against_is_the_same_attention(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, so that a tree is a text; bytes and operations as counted by hand."""
    monkeypatch.syspath_prepend(repository / "benchmarks")
    from gpu_cases import Case, build
    from gpu_speed import counted, torch_causal

    case = Case([63, 63], [40, 40], heads=(4, 2), head_size=64, dtype=torch.float32, back=1)
    step = build(case, "cpu")
    found = torch_causal(step)().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(found.double(), step.formula(torch.float64), rtol=1e-4, atol=1e-5)
    moved, work = counted(case)
    assert moved == 2 * (2 * 104 * 2 * 2 * 64 + 2 * 2 * 64 * 4 * 64)  # keys and values once, queries in, results out
    assert work == 2 * 64 * 104 * 4 * (2 * 64 + 2 * 64)  # two products of 64 multiplications and additions each
