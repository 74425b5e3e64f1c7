"""A toy target whose next tokens are a function of its hidden row, and recorded answers of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_medusa.training.hidden import HiddenRows, RowWriter

HIDDEN, VOCAB = 16, 24


@pytest.fixture
def target() -> torch.Tensor:
    """Unembedding and embedding in one, [VOCAB, HIDDEN]."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., HiddenRows]:
    """Write answers (lists of tokens) with given or random rows, interleaved as a batch would, and open them."""

    def make(
        answers: Sequence[Sequence[int]], hidden: Sequence[torch.Tensor] | None = None, seed: int = 0
    ) -> HiddenRows:
        generator = torch.Generator().manual_seed(seed)
        hidden = hidden or [torch.randn(len(answer), HIDDEN, generator=generator) for answer in answers]
        folder = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        writer = RowWriter(folder, HIDDEN)
        for step in range(max(map(len, answers))):
            here = [i for i, answer in enumerate(answers) if step < len(answer)]
            tokens = [answers[i][step] for i in here]
            writer.append(here, [step] * len(here), tokens, torch.stack([hidden[i][step] for i in here]))
        writer.close()
        return HiddenRows.open([folder])

    return make


@pytest.fixture
def walks(record: Callable[..., HiddenRows], target: torch.Tensor) -> Callable[[int, int], HiddenRows]:
    """`count` answers of a toy language that heads can learn: each token is the last + 3, each row shows its token."""

    def make(count: int, seed: int) -> HiddenRows:
        starts = np.random.default_rng(seed).integers(0, VOCAB, count)
        answers = [[int(start + 3 * i) % VOCAB for i in range(12)] for start in starts]
        # The row that produced a token is close to that token's embedding, plus noise.
        noise = torch.Generator().manual_seed(seed)
        rows = [
            target[torch.tensor(answer)] + 0.1 * torch.randn(len(answer), HIDDEN, generator=noise) for answer in answers
        ]
        return record(answers, rows)

    return make
