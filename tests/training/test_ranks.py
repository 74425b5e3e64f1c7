"""Several processes, started by torchrun, train the heads that one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import VOCAB, target, train, write_rows

from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.ranks import Ranks, alone, launched
from vllm_medusa.training.step import LoopOptions
from vllm_medusa.training.teacher import make_teacher

pytestmark = pytest.mark.slow


def launch(count: int, folder: Path) -> None:
    script = Path(__file__).with_name("rank_runs.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    found = subprocess.run([*map(str, command), str(script), str(folder)], capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write_rows(made / "rows")
    return made


@pytest.mark.parametrize("count", [2, 3] if os.environ.get("MEDUSA_LONG") else [3])
def test_heads_are_those_of_one_process(folder: Path, count: int) -> None:
    launch(count, folder)
    ranks: list[dict[str, Any]] = [
        torch.load(folder / f"heads-{count}-{number}.pt", weights_only=True) for number in range(count)
    ]
    rows = HiddenRows.open([folder / "rows"])
    teacher = make_teacher(target(), None, rows, folder / "teacher-1")
    told: list[str] = []
    alone_heads, done = train(rows, teacher, Ranks())
    assert done is not None and done.step == 2 * 10
    for mine, theirs in ((folder / "teacher-1", folder / f"teacher-{count}"),):
        for file in mine.iterdir():
            assert file.read_bytes() == (theirs / file.name).read_bytes(), "each process asked a part of it"
    # Rounded to bfloat16 on the way, sums in another order differ in a few of their last bits.
    for name, weight in alone_heads.state_dict().items():
        moved = (weight - ranks[0]["unbroken"][name]).norm() / weight.norm().clamp(min=1e-6)
        assert moved < 0.02, name
        in_pieces = (weight - ranks[0]["in pieces"][name]).norm() / weight.norm().clamp(min=1e-6)
        assert in_pieces < 0.02, name
        for one in ranks:
            assert torch.equal(one["unbroken"][name], ranks[0]["unbroken"][name]), "the same on each rank"
            assert torch.equal(one["unbroken"][name], one["resumed"][name]), "bit for bit"
    assert ranks[0]["losses"] == pytest.approx(done.losses, rel=1e-3)
    # What several began another number goes on with, and says so.
    goes_on, _ = train(rows, teacher, Ranks(), file=folder / f"run-{count}.pt", told=told)
    assert told and f"begun by {count} processes and goes on with 1" in told[0]
    assert torch.equal(goes_on.state_dict()["root"], ranks[0]["resumed"]["root"]), "it had all its steps"


def test_a_batch_in_pieces_is_the_batch(folder: Path) -> None:
    rows = HiddenRows.open([folder / "rows"])
    teacher = make_teacher(target(), None, rows, folder / "teacher-1")
    whole, _ = train(rows, teacher, Ranks())
    pieces, _ = train(rows, teacher, Ranks(), LoopOptions(epochs=2, batch_size=32, learning_rate=5e-3, accumulate=7))
    start, _ = train(rows, teacher, Ranks(), LoopOptions(epochs=1, batch_size=10**6, learning_rate=0.0))
    for name, weight in whole.state_dict().items():
        way = (weight - start.state_dict()[name]).norm()
        assert (weight - pieces.state_dict()[name]).norm() < 0.03 * way + 1e-7, name
    assert whole.config.vocab_size == VOCAB


def test_engines_of_the_first_process_do_not_know_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert launched() == Ranks(1, 4)
    with alone():
        assert not told.keys() & os.environ.keys() and launched() == Ranks()
    assert all(os.environ[name] == value for name, value in told.items())
