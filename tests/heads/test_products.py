"""The two CPU shortcuts of the hot path against plain torch."""

import pytest
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.products import largest, product


@pytest.mark.parametrize("rows", [1, 4, 128, 129])
def test_either_side_gives_the_same_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left, weight = (torch.randn(n, 48, generator=generator, dtype=torch.float64) for n in (rows, 96))
    torch.testing.assert_close(product(left, weight), left @ weight.T, rtol=1e-12, atol=1e-12)


def test_batched_product() -> None:
    left, weight = torch.randn(3, 5, 16, dtype=torch.float64), torch.randn(3, 8, 16, dtype=torch.float64)
    torch.testing.assert_close(product(left, weight), torch.einsum("bnh,bmh->bnm", left, weight))


@pytest.mark.parametrize("size", [100, 1280, 1408, 4096, 49152])
@pytest.mark.parametrize("k", [1, 7, 10])
def test_largest_in_two_rounds_is_topk(size: int, k: int) -> None:
    scores = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size + k))
    values, places = largest(scores, k)
    expected = scores.topk(k, dim=-1)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0)
    torch.testing.assert_close(places, expected.indices, rtol=0, atol=0)


def test_largest_with_ties_and_all_in_one_group() -> None:
    scores = torch.zeros(1, 2560)
    scores[0, 256:266] = torch.arange(10.0) + 1
    values, places = largest(scores, 10)
    assert places[0].tolist() == list(range(265, 255, -1))
    values, places = largest(torch.zeros(1, 2560), 10)  # any ten will do, but ten different ones
    assert len(set(places[0].tolist())) == 10 and not values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_candidates_are_the_softmax_of_the_logits(dtype: torch.dtype, batch: int) -> None:
    heads = MedusaHeads(HeadsConfig(num_heads=3, num_layers=2, hidden_size=16, vocab_size=2560, root_conditioned=True))
    generator = torch.Generator().manual_seed(batch)
    for parameter in heads.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    table = torch.randn(2560, 16, generator=generator).to(dtype)
    heads.to(dtype).bind(table, table)
    hidden, roots = torch.randn(batch, 16, generator=generator).to(dtype), torch.arange(batch)
    found = heads.candidates(hidden, roots, 10)
    expected = heads(hidden, roots).float().softmax(-1).topk(10, dim=-1)
    torch.testing.assert_close(found.probabilities, expected.values, rtol=1e-5, atol=1e-7)
    # In bfloat16 equal logits are common and may come in any order: compare what the tokens are worth.
    worth = heads(hidden, roots).float().softmax(-1).gather(-1, found.tokens)
    torch.testing.assert_close(worth, expected.values, rtol=1e-5, atol=1e-7)
