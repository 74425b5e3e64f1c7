"""Rows that a thread writes behind the steps: all of them, in order, and errors are told."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.training.hidden import HiddenRows, RowWriter, fill_tokens
from vllm_medusa.training.row_copies import MOST_WAITING, RowCopies

CPU = torch.device("cpu")


@pytest.mark.parametrize("in_thread", [False, True])
def test_rows_are_those_that_were_appended(tmp_path: Path, in_thread: bool) -> None:
    """However the memory they came in is used again meanwhile, and however many a step has."""
    rng, truth = np.random.default_rng(0), torch.randn(40, 30, 8).bfloat16()
    copies = RowCopies(RowWriter(tmp_path, 8), CPU, in_thread=in_thread)
    memory = torch.empty(40, 8)
    for position in range(30):
        here = int(rng.integers(25, 40))
        memory[:here] = truth[:here, position].float()
        copies.append(list(range(here)), [position] * here, memory[:here])
        memory.fill_(torch.nan)
    copies.close()
    answers = [[100 * number + i for i in range(24)] for number in range(25)]
    # Sequences 25 to 39 and places from 24 on are no tokens of an answer: as those of steps planned ahead.
    fill_tokens(tmp_path, answers, [*range(25), *[-1] * 15])
    rows = HiddenRows.open([tmp_path])
    assert rows.tokens.tolist() == [token for answer in answers for token in answer]
    assert torch.equal(rows.gather(np.arange(len(rows))), truth[:25, :24].flatten(0, 1))


def test_a_row_that_is_missing_is_noticed_and_one_that_is_there_twice_is_not_learnt_twice(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path, 2)
    writer.append([0, 0, 0, 1], [0, 1, 1, 0], [-1] * 4, torch.arange(8.0).view(4, 2))
    writer.close()
    with pytest.raises(RuntimeError, match="rows of 3 of 4 tokens"):
        fill_tokens(tmp_path, [[5, 6], [7, 8]], [0, 1])
    fill_tokens(tmp_path, [[7], [5, 6]], [1, 0])
    rows = HiddenRows.open([tmp_path])
    assert rows.tokens.tolist() == [7, 5, 6] and rows.gather(np.arange(3))[:, 0].tolist() == [6, 0, 2]


def test_a_step_does_not_wait_for_the_disk_until_it_is_far_behind(tmp_path: Path) -> None:
    class Slow(RowWriter):
        def append(self, *given: Any) -> None:
            time.sleep(0.02)
            super().append(*given)

    copies = RowCopies(Slow(tmp_path, 2), CPU, in_thread=True)
    began = time.monotonic()
    for position in range(MOST_WAITING // 2):
        copies.append([0], [position], torch.ones(1, 2))
    assert time.monotonic() - began < 0.02 * MOST_WAITING / 4
    copies.close()
    fill_tokens(tmp_path, [[1] * (MOST_WAITING // 2)], [0])


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    class Full(RowWriter):
        def append(self, *given: Any) -> None:
            raise OSError(28, "No space left on device")

    copies = RowCopies(Full(tmp_path, 2), CPU, in_thread=True)
    with pytest.raises(OSError, match="No space left"):
        for position in range(1000):
            copies.append([0], [position], torch.ones(1, 2))
            time.sleep(0.001)
    with pytest.raises(OSError, match="No space left"):
        copies.close()
