"""Before it answers, `train` says what its rows will take, as they then do."""

from pathlib import Path

import pytest
import torch

from vllm_medusa.heads.target import Target
from vllm_medusa.training import sizes
from vllm_medusa.training.hidden import HiddenRows, RowWriter
from vllm_medusa.training.sizes import in_words, row_bytes
from vllm_medusa.training.teacher import make_teacher


def test_what_is_said_is_what_lies_there(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "shard", 16)
    writer.append([0] * 500, list(range(500)), list(range(500)), torch.randn(500, 16))
    writer.close()
    table = torch.randn(40, 16)
    make_teacher(Target(table, table), None, HiddenRows.open([tmp_path / "shard"]), tmp_path)
    lying = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".json")
    assert lying == 500 * row_bytes(16)


def test_too_little_room_is_said_with_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: type("Free", (), {"free": 20_000_000_000}))
    said = in_words(tmp_path / "rows", 2_000_000, 8192, has_teacher=True)
    assert "take 33.0 GB" in said and "free: 20.0 GB" in said and "--max-tokens 1212000 does" in said
    assert "MAY NOT DO" not in in_words(tmp_path / "rows", 1_000_000, 8192, has_teacher=True)
