"""Small heads and a small target, random but the same every time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads

HIDDEN, VOCAB = 16, 50


@pytest.fixture
def target() -> tuple[torch.Tensor, torch.Tensor]:
    """Unembedding and embedding, each [VOCAB, HIDDEN], different from one another."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)


@pytest.fixture
def make_heads() -> Callable[..., MedusaHeads]:
    """Heads of the given shape with random weights (and a random token map), not bound."""

    def make(**options: Any) -> MedusaHeads:
        options = {"num_heads": 3, "num_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB, "top_k": 5} | options
        heads = MedusaHeads(HeadsConfig(**options))
        generator = torch.Generator().manual_seed(3)
        for parameter in heads.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if heads.token_map is not None:
            heads.token_map.copy_(torch.randperm(VOCAB, generator=generator)[: len(heads.token_map)])
        return heads.requires_grad_(False)

    return make
