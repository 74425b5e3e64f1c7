"""Lessons and the teacher behind them: each head learns from the row that produced the token it guesses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.target import Target
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.lessons import Lessons
from vllm_medusa.training.loop import draft_targets, train_heads
from vllm_medusa.training.step import LoopOptions
from vllm_medusa.training.teacher import Teacher, make_teacher

HIDDEN, VOCAB = 16, 24


@pytest.fixture
def heads(target: torch.Tensor) -> MedusaHeads:
    """Two heads that know the tokens 0 to 19."""
    heads = MedusaHeads(
        HeadsConfig(num_heads=2, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=20, top_k=5)
    )
    heads.bind(target, target)
    return heads


def dense(teacher: Teacher, rows: int) -> torch.Tensor:
    """[n, 20]."""
    tokens, shares = (
        torch.from_numpy(teacher.tokens.astype(np.int64)),
        torch.from_numpy(teacher.shares.astype(np.float32)),
    )
    return torch.zeros(rows, 20).scatter_add_(1, tokens, shares)


def test_the_teacher_is_the_targets_own_distribution(
    record: Callable[..., HiddenRows], heads: MedusaHeads, target: torch.Tensor, tmp_path: Path
) -> None:
    rows = record([[1, 2, 3], [4, 5]])
    teacher = make_teacher(Target(target, target), heads.token_map, rows, tmp_path)
    wanted = (rows.gather(np.arange(5)).float() @ target[:20].T).softmax(-1)
    assert teacher.tokens.shape == (5, 16)
    assert bool((np.diff(teacher.shares.astype(np.float32), axis=1) <= 0).all())
    # float16 shares, and the four least likely of 20 tokens left out
    torch.testing.assert_close(dense(teacher, 5), wanted, rtol=1e-3, atol=float(wanted.topk(17).values[:, 16].max()))


def test_the_target_is_asked_once(
    record: Callable[..., HiddenRows], heads: MedusaHeads, target: torch.Tensor, tmp_path: Path
) -> None:
    rows = record([[1, 2, 3]])
    asked: list[int] = []
    make_teacher(Target(target, target), heads.token_map, rows, tmp_path, lambda done, _: asked.append(done))
    (tmp_path / "half.tokens.partial").write_bytes(b"of a killed run")
    again = make_teacher(Target(target, target), heads.token_map, rows, tmp_path, lambda done, _: asked.append(done))
    assert asked == [3] and len(again.tokens) == 3
    make_teacher(
        Target(target, target), heads.token_map, record([[1, 2, 4]]), tmp_path, lambda done, _: asked.append(done)
    )
    assert asked == [3, 3]  # other rows, other distributions


def test_a_head_learns_from_the_row_that_produced_its_token(
    record: Callable[..., HiddenRows], heads: MedusaHeads, target: torch.Tensor, tmp_path: Path
) -> None:
    rows = record([[1, 2, 22, 3], [4, 5]])  # 22 is outside the draft vocabulary
    teacher = make_teacher(Target(target, target), heads.token_map, rows, tmp_path)
    targets = draft_targets(rows, heads)
    where, produced = np.arange(6), dense(teacher, 6)

    def lesson(loss: str, head: int) -> tuple[torch.Tensor, list[float]]:
        found = Lessons(targets, loss, None if loss == "ce" else teacher).of(where, head)  # type: ignore[arg-type]
        return torch.zeros(6, 20).scatter_add_(1, found.targets, found.shares), found.weights.tolist()

    nothing = torch.zeros(20)
    for head, producers in ((0, [1, 2, 3, None, 5, None]), (1, [2, 3, None, None, None, None])):
        said = [None if row is None else int(rows.tokens[row]) for row in producers]
        single = [nothing if token in (None, 22) else torch.eye(20)[token] for token in said]
        learnt, weights = lesson("ce", head)
        assert torch.equal(learnt, torch.stack(single))
        assert weights == pytest.approx([float(one.any()) / sum(bool(o.any()) for o in single) for one in single])
        whole = [nothing if row is None else produced[row] for row in producers]
        learnt, weights = lesson("kl", head)
        torch.testing.assert_close(learnt, torch.stack(whole))
        count = sum(row is not None for row in producers)
        assert weights == pytest.approx([0.0 if row is None else 1 / count for row in producers])
        half = [
            dist if token in (None, 22) else (one + dist) / 2
            for one, dist, token in zip(single, whole, said, strict=True)
        ]
        torch.testing.assert_close(lesson("mixed", head)[0], torch.stack(half))


def test_rows_that_teach_nothing_are_left_out(
    record: Callable[..., HiddenRows], heads: MedusaHeads, target: torch.Tensor, tmp_path: Path
) -> None:
    rows = record([[1, 22], [3], [4, 5, 6]])
    targets = draft_targets(rows, heads)
    assert Lessons(targets).useful().tolist() == [3, 4]
    teacher = make_teacher(Target(target, target), heads.token_map, rows, tmp_path)
    assert Lessons(targets, "kl", teacher).useful().tolist() == [0, 3, 4]


@pytest.mark.parametrize("loss", ["kl", "mixed"])
def test_heads_learn_from_distributions(record: Callable[..., HiddenRows], tmp_path: Path, loss: str) -> None:
    # Rows that show their token say nothing of the next one: here each row is what chose its token, for sure.
    target = 6 * torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)))
    heads = MedusaHeads(
        HeadsConfig(num_heads=2, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, root_conditioned=True, top_k=5)
    )
    heads.bind(target, target)
    answers = [[(start + 3 * i) % VOCAB for i in range(12)] for start in range(VOCAB)] * 3
    rows = record(answers, [target[torch.tensor(answer)] for answer in answers])
    teacher = make_teacher(Target(target, target), heads.token_map, rows, tmp_path)
    options = LoopOptions(epochs=30, batch_size=64, learning_rate=5e-3, loss=loss)  # type: ignore[arg-type]
    train_heads(heads, rows, options, teacher=teacher)
    start = torch.arange(VOCAB)
    tokens = heads.candidates(target[start], start, 1).tokens
    assert (tokens[:, 0, 0] == (start + 3) % VOCAB).float().mean() > 0.9
    assert (tokens[:, 1, 0] == (start + 6) % VOCAB).float().mean() > 0.9


@pytest.mark.parametrize(("batch_size", "times"), [(128, 8), (512, 4), (2048, 1)])
def test_pages_of_rows_and_distributions_are_given_back_while_training(
    walks: Callable[[int, int], HiddenRows],
    heads: MedusaHeads,
    target: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    times: int,
) -> None:
    rows = walks(180, 1)  # 1980 rows teach
    teacher = make_teacher(Target(target, target), heads.token_map, rows, tmp_path)
    given = {HiddenRows: 0, Teacher: 0}

    def count(kind: Any) -> None:
        release = kind.release

        def counting(self: Any) -> None:
            given[kind] += 1
            release(self)

        monkeypatch.setattr(kind, "release", counting)

    count(HiddenRows)
    count(Teacher)
    options = LoopOptions(epochs=1, batch_size=batch_size)
    train_heads(heads, rows, options, teacher=teacher)
    assert given == {HiddenRows: times, Teacher: times}


def test_distributions_without_a_teacher_are_a_bug_of_the_caller(
    walks: Callable[[int, int], HiddenRows], heads: MedusaHeads
) -> None:
    with pytest.raises(ValueError, match="teacher"):
        train_heads(heads, walks(2, 1), LoopOptions(loss="kl"))
