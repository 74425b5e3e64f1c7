"""Heads where nothing can be compiled: said once, and the same candidates."""

import logging
from collections.abc import Callable

import pytest
import torch

from vllm_medusa.heads import native
from vllm_medusa.heads.model import MedusaHeads


def test_without_a_compiler_the_candidates_are_the_same(
    make_heads: Callable[..., MedusaHeads],
    target: tuple[torch.Tensor, torch.Tensor],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heads = make_heads(draft_vocab_size=20)
    heads.bind(*target)
    hidden = torch.randn(6, heads.config.hidden_size, generator=torch.Generator().manual_seed(1))
    wanted = heads.candidates(hidden, None, 4)  # compiled, where there is a compiler
    request.getfixturevalue("no_compiler")
    with caplog.at_level(logging.INFO, logger=native.logger.name):
        for _ in range(2):
            found = heads.candidates(hidden, None, 4)
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.probabilities, wanted.probabilities, rtol=1e-5, atol=1e-6)  # sums in other orders
    assert ["no C++ compiler" in record.message for record in caplog.records] == [True]
