"""Training: a toy language is learnt, the same seed gives the same heads, the draft vocabulary is the right one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import choose_draft_vocab, draft_targets, train_heads
from vllm_medusa.training.step import LoopOptions, start_trunk

VOCAB = 24
Walks = Callable[[int, int], HiddenRows]
FAST = LoopOptions(epochs=30, batch_size=64, learning_rate=5e-3, loss="ce")


def new_heads(target: torch.Tensor, **options: Any) -> MedusaHeads:
    options = {"num_heads": 2, "num_layers": 1, "hidden_size": 16, "vocab_size": VOCAB, "top_k": 5} | options
    heads = MedusaHeads(HeadsConfig(**options))
    heads.bind(target, target)
    return heads


def accuracy(heads: MedusaHeads, rows: HiddenRows) -> list[float]:
    """Share of right top guesses of each head."""
    tokens = heads.candidates(rows.gather(np.arange(len(rows))).float(), torch.from_numpy(rows.tokens).long(), 1).tokens
    targets = torch.from_numpy(rows.targets(heads.config.num_heads))
    known = targets >= 0
    return [float((tokens[:, k, 0] == targets[:, k])[known[:, k]].float().mean()) for k in range(targets.shape[1])]


@pytest.mark.parametrize(
    ("root_conditioned", "num_layers", "trunk_size"),
    [(False, 1, None), (True, 1, None), (True, 2, None), (True, 0, 48)],
)
def test_heads_learn_a_toy_language(
    walks: Walks, target: torch.Tensor, root_conditioned: bool, num_layers: int, trunk_size: int | None
) -> None:
    heads = new_heads(target, root_conditioned=root_conditioned, num_layers=num_layers, trunk_size=trunk_size)
    unseen, rows = walks(20, 2), walks(60, 1)
    start_trunk(heads, rows, seed=0)
    before = accuracy(heads, unseen)
    progress = train_heads(heads, rows, FAST)
    assert progress.step == progress.steps > 0
    assert max(before) < 0.3
    assert min(accuracy(heads, unseen)) > 0.75  # one block in 16 dimensions cannot tell 24 tokens apart quite


def test_the_root_is_used_where_the_row_does_not_tell(record: Callable[..., HiddenRows], target: torch.Tensor) -> None:
    starts = np.random.default_rng(0).integers(0, VOCAB, 60)
    rows = record([[int(start + 3 * i) % VOCAB for i in range(12)] for start in starts])  # rows are pure noise
    seeing, blind = new_heads(target, root_conditioned=True), new_heads(target)
    for heads in (seeing, blind):
        train_heads(heads, rows, FAST)
    unseen = record([[int(start + 3 * i) % VOCAB for i in range(12)] for start in range(VOCAB)], seed=9)
    assert accuracy(seeing, unseen)[0] > accuracy(blind, unseen)[0] + 0.3


def test_the_same_seed_gives_the_same_heads(walks: Walks, target: torch.Tensor) -> None:
    rows, options = walks(20, 1), LoopOptions(epochs=2, batch_size=32, loss="ce", seed=4)
    first, second, other = (new_heads(target, root_conditioned=True) for _ in range(3))
    train_heads(first, rows, options)
    train_heads(second, rows, options)
    train_heads(other, rows, LoopOptions(epochs=2, batch_size=32, loss="ce", seed=5))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.layers[0].weight, other.layers[0].weight)


def test_the_target_is_not_touched(walks: Walks, target: torch.Tensor) -> None:
    before = target.clone()
    train_heads(new_heads(target, root_conditioned=True), walks(10, 1), LoopOptions(epochs=1, loss="ce"))
    assert torch.equal(target, before)


def test_training_ends_with_heads_that_need_no_gradient(walks: Walks, target: torch.Tensor) -> None:
    heads = new_heads(target)
    train_heads(heads, walks(10, 1), LoopOptions(epochs=1, loss="ce"))
    assert not any(parameter.requires_grad for parameter in heads.parameters()) and not heads.training


def test_targets_outside_the_draft_vocabulary_are_misses_not_lessons(
    record: Callable[..., HiddenRows], target: torch.Tensor
) -> None:
    heads = new_heads(target, draft_vocab_size=6)
    assert heads.token_map is not None
    heads.token_map.copy_(torch.tensor([2, 3, 5, 7, 11, 13]))
    rows = record([[2, 4, 5, 13]])
    assert draft_targets(rows, heads).tolist() == [[-2, 2], [2, 5], [5, -1], [-1, -1]]


def test_the_draft_vocabulary_is_the_most_frequent_tokens_then_the_lowest() -> None:
    tokens = np.array([9, 9, 9, 4, 4, 7], dtype=np.int32)
    assert choose_draft_vocab(tokens, 2, 12).tolist() == [4, 9]
    assert choose_draft_vocab(tokens, 5, 12).tolist() == [0, 1, 4, 7, 9]
    assert choose_draft_vocab(tokens, 12, 12).tolist() == list(range(12))


@pytest.mark.parametrize("size", [0, 13])
def test_an_impossible_draft_vocabulary_is_named(size: int) -> None:
    with pytest.raises(MedusaError, match=f"draft_vocab_size={size}"):
        choose_draft_vocab(np.array([1], dtype=np.int32), size, 12)


def test_answers_of_one_token_teach_nothing(record: Callable[..., HiddenRows], target: torch.Tensor) -> None:
    with pytest.raises(MedusaError, match="longer"):
        train_heads(new_heads(target), record([[1], [2]]), LoopOptions(loss="ce"))
