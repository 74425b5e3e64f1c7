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
    found = linear_cross_entropy(states, unembedding, targets, weights)
    (found_slope,) = torch.autograd.grad(2.5 * found, states)
    # Its softmax runs in float32, whatever the products run in.
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_slope, slope, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    states = torch.full((2, 4), 1e4, requires_grad=True)
    unembedding = torch.eye(4) * 3
    found = linear_cross_entropy(states, unembedding, torch.tensor([0, 1]), torch.ones(2))
    found.backward()
    assert torch.isfinite(found) and states.grad is not None and bool(torch.isfinite(states.grad).all())


def test_no_rows_are_no_loss() -> None:
    states = torch.zeros(0, 4, requires_grad=True)
    found = linear_cross_entropy(states, torch.eye(4), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    found.backward()
    assert found.item() == 0.0
