"""Heads on a target that several ranks hold in parts, or that is quantized, say what they say on a whole one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.parts import TargetPart

Target = tuple[Tensor, Tensor]
Make = Callable[..., MedusaHeads]
SHAPES: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 20},
    {"unembedding": "shared"},
    {"unembedding": "per_head", "draft_vocab_size": 20},
    {"root_conditioned": True, "logit_scale": 0.7},
]
IDS = ["the target's", "draft vocabulary", "one of their own", "one each", "root-conditioned"]


class Ranks:
    """Threads in place of processes: `gather` waits for every rank and hands all of them the same tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._told: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, values: Tensor) -> Tensor:
        self._told[rank] = values
        self._barrier.wait()
        gathered = torch.stack(self._told)
        self._barrier.wait()
        return gathered

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns on every rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))

    def part(self, rank: int, target: Target, *, plain: bool = True) -> TargetPart:
        """A rank's part, in equal pieces of 16 tokens' padding as the host cuts them; the last may have no row."""
        unembedding, embedding = target
        vocab = len(unembedding)
        piece = -(-vocab // (16 * self.size)) * 16
        first, end = min(rank * piece, vocab), min((rank + 1) * piece, vocab)
        weight = unembedding[first:end]
        return TargetPart(
            vocab_size=vocab,
            hidden_size=unembedding.shape[1],
            dtype=unembedding.dtype,
            device=unembedding.device,
            first=first,
            rows=end - first,
            weight=weight if plain else None,
            multiply=lambda states: states @ weight.T,
            embed=lambda tokens: embedding[tokens],
            gather=lambda values: self.gather(rank, values),
        )


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "quantized"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_parts_say_what_the_whole_says(
    make_heads: Make, target: Target, shape: dict[str, Any], size: int, plain: bool
) -> None:
    calibration = Calibration(temperatures=[0.5, 1.0, 3.0], rank_accuracy=[[0.1] * 5] * 3)
    whole = make_heads(calibration=calibration, **shape)
    whole.bind(*target)
    hidden, roots = torch.randn(6, 16), torch.arange(6) * 9
    ranks = Ranks(size)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = make_heads(calibration=calibration, **shape)
        heads.bind_part(ranks.part(rank, target, plain=plain))
        heads.freeze()
        return *heads.candidates(hidden, roots, 5), heads(hidden, roots)

    wanted = *whole.candidates(hidden, roots, 5), whole(hidden, roots)
    found = ranks.each(work)
    for tokens, probabilities, logits in found:
        assert torch.equal(tokens, wanted[0])
        # float32 sums of 16 products, in another order
        torch.testing.assert_close(probabilities, wanted[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logits, wanted[2], rtol=1e-5, atol=1e-5)
        assert all(
            torch.equal(part, first) for part, first in zip((tokens, probabilities, logits), found[0], strict=True)
        )


@pytest.mark.parametrize("shape", SHAPES[:4], ids=IDS[:4])
def test_ranks_agree_though_their_hidden_rows_do_not(make_heads: Make, target: Target, shape: dict[str, Any]) -> None:
    """The last bits of a hidden row may differ between ranks: the order of sums is the host's affair."""
    ranks, roots = Ranks(3), torch.zeros(40, dtype=torch.int64)
    hidden = torch.randn(40, 16)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = make_heads(**shape)
        heads.bind_part(ranks.part(rank, target))
        own = hidden + rank  # more than the last bits, so that ranks would surely disagree
        return *heads.candidates(own, roots, 5), heads(own, roots)

    first, *others = ranks.each(work)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_of_equals_wins(make_heads: Make, size: int) -> None:
    """Every token twice, in parts of different ranks: the lower one comes first, wherever it lies."""
    table = torch.zeros(24, 16)  # a number in each row: a library that adds in another order has nothing to add
    table[torch.arange(24), torch.arange(24) % 16] = torch.where(torch.arange(24) < 16, 1.0, -1.0)
    table = torch.cat([table, table])
    ranks = Ranks(size)

    def work(rank: int) -> Tensor:
        heads = make_heads(vocab_size=48, top_k=6)
        heads.bind_part(ranks.part(rank, (table, table)))
        return heads.candidates(torch.randn(4, 16, generator=torch.Generator().manual_seed(4)), None, 6).tokens

    for tokens in ranks.each(work):
        assert (tokens[..., 1::2] == tokens[..., ::2] + 24).all()


def test_more_candidates_than_a_rank_has_tokens(make_heads: Make) -> None:
    """17 tokens in pieces of 16: the second rank has one, the third none."""
    table = torch.randn(17, 16, generator=torch.Generator().manual_seed(3))
    ranks = Ranks(3)

    def work(rank: int) -> Tensor:
        heads = make_heads(vocab_size=17, top_k=17)
        heads.bind_part(ranks.part(rank, (table, table)))
        return heads.candidates(torch.randn(2, 16), None, 17).tokens

    for tokens in ranks.each(work):
        assert (tokens.sort(dim=-1).values == torch.arange(17)).all()


@pytest.mark.parametrize("vocab", [40, 64], ids=["smaller", "padded"])
def test_heads_with_another_vocabulary(make_heads: Make, target: Target, vocab: int) -> None:
    """Only tokens that both the heads and the target's 50 know are guessed."""
    heads = make_heads(vocab_size=vocab)
    heads.bind_part(Ranks(1).part(0, target))
    assert heads.config.vocab_size == min(vocab, 50)
    assert int(heads.candidates(torch.randn(50, 16), None, 5).tokens.max()) < min(vocab, 50)


def test_a_part_of_another_size_is_refused(make_heads: Make, target: Target) -> None:
    with pytest.raises(MedusaError, match=r"lm_head of the target=\[50, 16\]: the heads need \[50, 32\]"):
        make_heads(hidden_size=32).bind_part(Ranks(1).part(0, target))
