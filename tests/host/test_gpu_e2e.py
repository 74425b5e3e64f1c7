"""`make gpu-e2e` where there is no GPU: it says so, or rehearses its comparison on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, as a user starts it."""
    command = [sys.executable, str(repository / "benchmarks" / "gpu_e2e.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(repository: Path) -> None:
    done = run(repository)
    assert done.returncode == 2 and "No GPU here: nothing was compared" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"gpu": None, "ok": False}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_rehearses_on_a_cpu(repository: Path, speaker_model: Path, speaker_heads: Path, tmp_path: Path) -> None:
    """Both engines start, answer greedily and with seeds, and are compared."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("red green", "blue and certainly")))
    pair = ["--model", str(speaker_model), "--heads", str(speaker_heads)]
    done = run(repository, "--rehearse", *pair, "--data", str(data), "--max-tokens", "12", "--max-model-len", "256")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"gpu": None, "same_tokens": {"eager, greedy": [2, 2], "eager, seeded": [2, 2]}, "ok": True}


@pytest.mark.gpu
def test_on_a_gpu(repository: Path) -> None:
    done = run(repository, "--prompts", "4", "--batch-sizes", "1,8")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and report["ok"] and report["speed"], done.stdout[-2000:] + done.stderr[-2000:]
