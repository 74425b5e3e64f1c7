"""The store of hidden rows: order, shards, targets at answers' ends, and what a killed writer leaves behind."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HIDDEN, INDEX, HiddenRows, RowWriter
from vllm_medusa.training.lessons import Lessons
from vllm_medusa.training.loop import draft_targets


def test_interleaved_steps_come_back_answer_by_answer(record: Callable[..., HiddenRows]) -> None:
    hidden = [torch.randn(3, 16), torch.randn(1, 16), torch.randn(2, 16)]
    rows = record([[1, 2, 3], [9], [5, 6]], hidden)
    assert rows.tokens.tolist() == [1, 2, 3, 9, 5, 6]
    assert rows.sequences.tolist() == [0, 0, 0, 1, 2, 2]
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert torch.equal(rows.gather(np.arange(6)), torch.cat(hidden).bfloat16())
    assert torch.equal(rows.gather(np.array([4, 0])), torch.stack([hidden[2][0], hidden[0][0]]).bfloat16())


def test_targets_stop_at_the_end_of_an_answer(record: Callable[..., HiddenRows]) -> None:
    targets = record([[11, 12, 13], [21], [31, 32]]).targets(2)
    assert targets.tolist() == [[12, 13], [13, -1], [-1, -1], [-1, -1], [32, -1], [-1, -1]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 8))
def test_targets_equal_a_loop(lengths: list[int], num_heads: int) -> None:
    answers = [[100 * number + i for i in range(length)] for number, length in enumerate(lengths)]
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    tokens = np.concatenate([np.array(answer, dtype=np.int32) for answer in answers])
    rows = HiddenRows(sequences, sequences, tokens, 1, (), sequences.astype(np.int16), sequences.astype(np.int64))
    wanted = [
        [answer[at + 1 + k] if at + 1 + k < len(answer) else -1 for k in range(num_heads)]
        for answer in answers
        for at in range(len(answer))
    ]
    assert rows.targets(num_heads).tolist() == wanted


def test_answers_of_several_stores_stay_apart(tmp_path: Path) -> None:
    for number in range(3):
        writer = RowWriter(tmp_path / str(number), 4)
        writer.append([0, 1], [0, 0], [10 * number, 10 * number + 1], torch.full((2, 4), float(number)))
        writer.close()
    rows = HiddenRows.open([tmp_path / str(number) for number in range(3)])
    assert rows.sequences.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.tokens.tolist() == [0, 1, 10, 11, 20, 21]
    assert rows.gather(np.array([5, 0, 3]))[:, 0].tolist() == [2.0, 0.0, 1.0]
    assert (rows.targets(1) == -1).all()


@pytest.mark.parametrize(("file", "cut"), [(HIDDEN, 3), (HIDDEN, 8), (INDEX, 2), (INDEX, 12)])
def test_a_torn_last_step_is_cut_off(tmp_path: Path, file: str, cut: int) -> None:
    writer = RowWriter(tmp_path, 4)
    for step in range(3):
        writer.append([0], [step], [step], torch.full((1, 4), float(step)))
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[:-cut])
    rows = HiddenRows.open([tmp_path])
    assert rows.tokens.tolist() == [0, 1]
    assert rows.gather(np.arange(2))[:, 0].tolist() == [0.0, 1.0]


def test_every_step_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path, 4)
    writer.append([0], [0], [7], torch.ones(1, 4))
    assert HiddenRows.open([tmp_path]).tokens.tolist() == [7]


def test_rows_of_another_width_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        RowWriter(tmp_path, 4).append([0], [0], [7], torch.ones(1, 5))


def test_a_folder_that_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match=r"rows=.*not a store"):
        HiddenRows.open([tmp_path])
    with pytest.raises(MedusaError, match="generate answers first"):
        HiddenRows.open([])


def test_a_row_takes_few_bytes_of_memory(tmp_path: Path) -> None:
    """Hidden rows stay on disk: what grows with the answers are tokens, targets and where each row lies."""
    count, hidden_size = 60_000, 16
    for shard in range(3):
        writer = RowWriter(tmp_path / str(shard), hidden_size)
        sequences, positions = np.divmod(np.arange(count // 3), 100)
        writer.append(sequences.tolist(), positions.tolist(), [1] * len(sequences), torch.zeros(20_000, hidden_size))
        writer.close()
    heads = MedusaHeads(HeadsConfig(num_heads=4, num_layers=0, hidden_size=hidden_size, vocab_size=50))
    tracemalloc.start()
    rows = HiddenRows.open([tmp_path / str(shard) for shard in range(3)])
    lessons = Lessons(draft_targets(rows, heads))
    order = np.random.default_rng(0).permutation(lessons.useful())
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == count and len(order) == count * 99 // 100
    assert kept / count < 42  # 18 for the rows, 16 for four heads' targets, 4 for the order
    assert peak / count < 64


def test_released_pages_are_read_again(record: Callable[..., HiddenRows]) -> None:
    rows = record([[1, 2, 3]], [torch.arange(48.0).reshape(3, 16)])
    before = rows.gather(np.arange(3))
    rows.release()
    assert torch.equal(rows.gather(np.arange(3)), before)
