"""The compiled part of the heads against torch."""

import shutil

import pytest
import torch

from vllm_medusa.heads import native

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 15, 16, 17, 40, 130])
@pytest.mark.parametrize("vocab", [10, 63, 64, 1000])
def test_the_best_tokens_are_topk_of_softmax(dtype: torch.dtype, count: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(count * vocab)
    scales = torch.rand(count, generator=generator) + 0.5
    for logits in (
        (4 * torch.randn(count, vocab, generator=generator)).to(dtype),
        (4 * torch.randn(vocab, count, generator=generator)).to(dtype).T,  # as a product with the matrix on its left
    ):
        found = native.best_tokens(logits, scales, 10)
        assert found is not None
        places, probabilities = found
        expected = (logits.float() * scales[:, None]).softmax(-1)
        torch.testing.assert_close(probabilities, expected.topk(10).values, rtol=2e-6, atol=1e-8)
        torch.testing.assert_close(expected.gather(1, places), probabilities, rtol=2e-6, atol=1e-8)
        assert all(len(set(row)) == 10 for row in places.tolist())


def test_ties_go_to_the_earlier_token_and_nan_is_no_candidate() -> None:
    logits = torch.tensor([[1.0, float("nan"), 3.0, 3.0, 2.0, float("-inf")]])
    found = native.best_tokens(logits, torch.ones(1), 6)
    assert found is not None
    assert found[0].tolist() == [[2, 3, 4, 0, 0, 0]]
    wanted = torch.tensor([[3.0, 3.0, 2.0, 1.0]]).softmax(-1)
    torch.testing.assert_close(found[1], torch.cat([wanted, torch.zeros(1, 2)], dim=1))


def test_no_number_at_all_and_numbers_far_apart() -> None:
    found = native.best_tokens(torch.full((1, 70), float("nan")), torch.ones(1), 3)
    assert found is not None and not found[1].any()
    found = native.best_tokens(torch.tensor([[-1e30, 1e30] + [0.0] * 80]), torch.ones(1), 3)
    assert found is not None and found[0][0, 0] == 1 and found[1][0, 0] == 1.0
    rising = torch.arange(0, 500, dtype=torch.float32)[None]  # a new maximum in every chunk
    found = native.best_tokens(rising, torch.ones(1), 3)
    assert found is not None
    torch.testing.assert_close(found[1], rising.softmax(-1).topk(3).values)


def test_what_does_not_fit_is_left_to_torch() -> None:
    assert native.best_tokens(torch.zeros(1, 64).double(), torch.ones(1), 1) is None


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    row = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert native.best_tokens(row, torch.ones(1), 1) is None
