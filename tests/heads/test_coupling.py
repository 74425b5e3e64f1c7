"""Coupled candidates: by the target's noise, and at temperature 0 the likeliest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.coupling import coupled_candidates
from vllm_medusa.heads.model import MedusaHeads

Target = tuple[Tensor, Tensor]
TEMPERATURES = torch.tensor([0.0, 0.7, 1.5])


class Noise:
    """Gumbel noise by token, as a target would have it."""

    def __init__(self, batch: int, heads: int, vocab: int) -> None:
        self.by_token = -torch.log(
            torch.empty(batch, heads, vocab).exponential_(generator=torch.Generator().manual_seed(1))
        )

    def __call__(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        noise = self.by_token if tokens is None else self.by_token[..., tokens]
        asked = TEMPERATURES[:, None, None]
        return torch.where(asked > 0, logits / asked.clamp(min=1e-9) + noise, logits)


@pytest.fixture(params=[None, 20], ids=["all tokens", "a few"])
def heads(request: pytest.FixtureRequest, make_heads: Callable[..., MedusaHeads], target: Target) -> MedusaHeads:
    calibration = Calibration(temperatures=[1.0, 1.5, 2.0], rank_accuracy=[[0.1] * 5] * 3)
    made = make_heads(draft_vocab_size=request.param, calibration=calibration)
    made.bind(*target)
    return made


def test_by_the_formula(heads: MedusaHeads, target: Target) -> None:
    hidden, roots = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)), torch.tensor([1, 2, 3])
    noise = Noise(3, 3, 50)
    found = coupled_candidates(heads, hidden, roots, 4, TEMPERATURES, noise)
    usual = heads.candidates(hidden, roots, 4)
    assert (found.tokens[0] == usual.tokens[0]).all()
    torch.testing.assert_close(found.probabilities[0], usual.probabilities[0])
    logits = heads(hidden, roots)
    for row, asked in enumerate(TEMPERATURES.tolist()):
        for head, calibrated in enumerate((1.0, 1.5, 2.0)):
            gumbel = noise.by_token[row, head]
            gumbel = gumbel if heads.token_map is None else gumbel[heads.token_map]
            scores = (logits[row, head] + asked * gumbel) / (asked**2 + calibrated**2) ** 0.5
            values, places = scores.softmax(-1).topk(4)
            tokens = places if heads.token_map is None else heads.token_map[places]
            assert found.tokens[row, head].tolist() == tokens.tolist()
            torch.testing.assert_close(found.probabilities[row, head], values)


def test_heads_that_are_the_target_know_what_it_draws(heads: MedusaHeads) -> None:
    hidden, roots = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)), torch.tensor([1, 2, 3])
    noise = Noise(3, 3, 50)
    drawn = noise(heads(hidden, roots), heads.token_map).argmax(-1)
    found = coupled_candidates(heads, hidden, roots, 1, TEMPERATURES, noise).tokens[..., 0]
    assert found.tolist() == (drawn if heads.token_map is None else heads.token_map[drawn]).tolist()
