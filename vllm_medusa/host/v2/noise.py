"""The noise by which the host's sampler will draw the tokens of the next step, added to what the heads say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

BLOCK = 1024


@triton.jit
def _perturb(
    logits_ptr,
    tokens_ptr,  # None: a place is a token
    slots_ptr,
    positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    num_heads,
    vocab,
    SIZE: tl.constexpr,
    FP64: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // num_heads
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = place < vocab
    token = place
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + place, mask=inside, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + request)
    # The host's function returns the largest along the first dimension: of one row each element.
    drawn, _ = gumbel_noised_argmax(
        tl.load(logits_ptr + row * vocab + place, mask=inside, other=0.0)[None, :],
        token[None, :],
        inside[None, :],
        tl.load(seeds_ptr + slot),
        tl.load(positions_ptr + request) + row % num_heads,
        tl.load(temperatures_ptr + slot).to(tl.float32),
        IS_DRAFTING=False,
        USE_FP64=FP64,
    )
    tl.store(logits_ptr + row * vocab + place, drawn.to(tl.float32), mask=inside)


@dataclass(frozen=True)
class SharedNoise:
    """Of one step.

    Attributes:
        slots: int64 [B].
        positions: int64 [B], of the requests' roots.
        temperatures: float32 [S], seeds: int64 [S], of all slots.
        fp64: the host's sampler computes noise in float64.
    """

    slots: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor
    fp64: bool

    def __call__(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """As `heads.coupling.Perturb`, in place where that can be."""
        logits = logits.contiguous()
        batch, num_heads, vocab = logits.shape
        kernel: Any = _perturb[(batch * num_heads, triton.cdiv(vocab, BLOCK))]
        kernel(
            *(logits, tokens, self.slots, self.positions, self.temperatures, self.seeds),
            *(num_heads, vocab),
            SIZE=BLOCK,
            FP64=self.fp64,
        )
        return logits
