"""The chunked cross-entropy against torch's, value and gradient."""

import pytest
import torch

from vllm_medusa.training.cross_entropy import CHUNK, linear_cross_entropy


@pytest.mark.parametrize("rows", [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_value_and_gradient_equal_torchs(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    unembedding = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 30, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    wanted = (torch.nn.functional.cross_entropy(states @ unembedding.T, targets, reduction="none") * weights).sum()
    (slope,) = torch.autograd.grad(2.5 * wanted, states)
    found = linear_cross_entropy(states, unembedding, targets[:, None], torch.ones(rows, 1), weights)
    (found_slope,) = torch.autograd.grad(2.5 * found, states)
    # Its softmax runs in float32, whatever the products run in.
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_slope, slope, rtol=1e-4, atol=1e-5)


def test_the_gradient_reaches_an_unembedding_that_is_learnt() -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(CHUNK + 7, 8, generator=generator, requires_grad=True)
    unembedding = torch.randn(30, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 30, (CHUNK + 7,), generator=generator)
    weights = torch.rand(CHUNK + 7, generator=generator)
    wanted = (torch.nn.functional.cross_entropy(states @ unembedding.T, targets, reduction="none") * weights).sum()
    slopes = torch.autograd.grad(2.5 * wanted, [states, unembedding])
    found = linear_cross_entropy(states, unembedding, targets[:, None], torch.ones(CHUNK + 7, 1), weights)
    found_slopes = torch.autograd.grad(2.5 * found, [states, unembedding])
    for slope, found_slope in zip(slopes, found_slopes, strict=True):
        torch.testing.assert_close(found_slope, slope, rtol=1e-4, atol=1e-5)


def test_products_in_bfloat16_leave_a_float32_unembedding_its_own_gradient() -> None:
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(50, 8, generator=generator, requires_grad=True)
    unembedding = torch.randn(30, 8, generator=generator, requires_grad=True)
    rest = (torch.randint(0, 30, (50, 1), generator=generator), torch.ones(50, 1), torch.rand(50, generator=generator))
    exact = torch.autograd.grad(linear_cross_entropy(states, unembedding, *rest), [states, unembedding])
    rounded = torch.autograd.grad(
        linear_cross_entropy(states, unembedding, *rest, dtype=torch.bfloat16), [states, unembedding]
    )
    for slope, wanted in zip(rounded, exact, strict=True):
        assert slope.dtype == torch.float32
        # bfloat16 keeps 8 bits: 0.4 % of each factor, of sums over 8 or 50 products
        torch.testing.assert_close(slope, wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


@pytest.mark.parametrize("whole", [1.0, 0.8])
def test_shared_targets_equal_the_weighted_sum_of_single_ones(whole: float) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 8, generator=generator, requires_grad=True)
    unembedding = torch.randn(30, 8, generator=generator)
    targets = torch.stack([torch.randperm(30, generator=generator)[:4] for _ in range(40)])
    shares = whole * torch.randn(40, 4, generator=generator).softmax(1)
    weights = torch.rand(40, generator=generator)
    guessed = (states @ unembedding.T).log_softmax(1)
    wanted = -((guessed.gather(1, targets) * shares).sum(1) * weights).sum()
    (slope,) = torch.autograd.grad(wanted, states)
    found = linear_cross_entropy(states, unembedding, targets, shares, weights)
    (found_slope,) = torch.autograd.grad(found, states)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_slope, slope, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    states = torch.full((2, 4), 1e4, requires_grad=True)
    found = linear_cross_entropy(states, torch.eye(4) * 3, torch.tensor([[0], [1]]), torch.ones(2, 1), torch.ones(2))
    found.backward()
    assert torch.isfinite(found) and states.grad is not None and bool(torch.isfinite(states.grad).all())


def test_no_rows_are_no_loss() -> None:
    states = torch.zeros(0, 4, requires_grad=True)
    none = torch.zeros(0, 1)
    found = linear_cross_entropy(states, torch.eye(4), none.long(), none, torch.zeros(0))
    found.backward()
    assert found.item() == 0.0
