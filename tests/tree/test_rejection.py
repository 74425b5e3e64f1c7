"""Recursive rejection: whatever the children were drawn from, what comes out has the target's distribution."""

import numpy as np
import pytest
import torch

from vllm_medusa.tree.rejection import draw_children, recursive_rejection

ROWS = 100_000
TARGET = torch.tensor([0.05, 0.4, 0.3, 0.0, 0.2, 0.05])
PROPOSAL = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.15, 0.05])
LIMIT = 20.5  # chi-square of 5 degrees of freedom: a right sampler is above it once in a thousand seeds


def uniforms(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() / expected.double().sum() * len(tokens)
    assert counts[wanted == 0].sum() == 0, "a token that the target never says"
    return float(((counts - wanted) ** 2 / wanted)[wanted > 0].sum())


def draws(children: int, seed: int = 1) -> torch.Tensor:
    return draw_children(PROPOSAL.log().expand(ROWS, -1), children, uniforms(ROWS, 6, seed=seed))


@pytest.mark.parametrize("children", [1, 2, 3, 5])
def test_tokens_have_the_targets_distribution(children: int) -> None:
    drawn = draws(children)
    target, proposal = TARGET.expand(ROWS, -1), PROPOSAL.expand(ROWS, -1)
    tokens = recursive_rejection(target, proposal, drawn, uniforms(ROWS, children + 1, seed=2))
    assert chi_square(tokens, TARGET) < LIMIT
    accepted = (drawn == tokens[:, None]).any(1).double().mean()
    # Two distributions share 1 - (total variation) of their mass: what one child is accepted with.
    assert accepted > torch.minimum(TARGET, PROPOSAL).sum() - 0.01


def test_a_wrong_judge_is_caught() -> None:
    """The same test fails a sampler that takes a child with p instead of p / q."""
    drawn = draws(1)[:, 0]
    taken = uniforms(ROWS, seed=3) < TARGET[drawn]
    rest = torch.multinomial(TARGET, ROWS, replacement=True, generator=torch.Generator().manual_seed(4))
    assert chi_square(torch.where(taken, drawn, rest), TARGET) > 10 * LIMIT


def test_children_are_drawn_without_replacement_in_the_order_of_one_by_one() -> None:
    drawn = draws(2)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert chi_square(drawn[:, 0], PROPOSAL) < LIMIT
    second = drawn[drawn[:, 0] == 0, 1]
    without_first = PROPOSAL.clone()
    without_first[0] = 0.0
    assert chi_square(second, without_first) < LIMIT


def test_equal_distributions_accept_the_first_child() -> None:
    drawn = draws(2)
    same = PROPOSAL.expand(ROWS, -1)
    assert torch.equal(recursive_rejection(same, same, drawn, uniforms(ROWS, 3, seed=5)), drawn[:, 0])


def test_padding_is_no_child() -> None:
    """A row without children draws from the target, a row with one is not judged by the other's."""
    children = torch.tensor([[-1, -1], [3, -1]]).repeat(ROWS // 2, 1)
    always_3 = torch.nn.functional.one_hot(torch.tensor(3), 6).float()  # which the target never says
    proposals = torch.stack([PROPOSAL, always_3]).repeat(ROWS // 2, 1)
    tokens = recursive_rejection(TARGET.expand(ROWS, -1), proposals, children, uniforms(ROWS, 3, seed=6))
    assert chi_square(tokens[::2], TARGET) < LIMIT
    assert chi_square(tokens[1::2], TARGET) < LIMIT
    rows = np.unique(tokens.numpy())
    assert 3 not in rows and -1 not in rows
