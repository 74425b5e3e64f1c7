"""The commit on a GPU: accepted tokens move inside the paged cache, in all layers by one launch.

Needs torch and triton, no host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements that a program moves at once
_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


class SlotMover:
    """Moves cached tokens from slot to slot, whatever the cache holds; no value comes back from the device."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """`caches`: of several layers, each [blocks, Hkv, block, content], with any strides, the same for all.

        They must outlive this object.
        """
        cache = caches[0]
        assert all(c.stride() == cache.stride() and c.dtype == cache.dtype for c in caches)
        self._caches = list(caches)
        self._addresses = torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=cache.device)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move tokens of R requests, those of one request one after the other.

        Args:
            sources, targets: int64 [R, M], slots; a source of -1 is nothing to move. A target may be an earlier move's
                source, never a later one's; requests share no slots.
        """
        assert sources.shape == targets.shape and sources.stride() == targets.stride()
        cache = self._caches[0]
        _, heads, block_size, content = cache.shape
        padded = triton.next_power_of_2(content)
        tile = min(max(1, _TILE // padded), triton.next_power_of_2(heads))
        _move[(len(sources), len(self._caches), triton.cdiv(heads, tile))](
            *(self._addresses, sources, targets, sources.shape[1], *sources.stride(), *cache.stride(), heads),
            BLOCK=block_size,
            CONTENT=content,
            PADDED=padded,
            HEADS=tile,
            BITS=_BITS[cache.element_size()],
            num_warps=4,
        )


@triton.jit(do_not_specialize=["moves", "request_stride", "move_stride"])
def _move(
    addresses_at,
    sources_at,
    targets_at,
    moves,
    request_stride,
    move_stride,
    block_stride,
    head_stride,
    token_stride,
    content_stride,
    heads,
    BLOCK: tl.constexpr,
    CONTENT: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
):
    """The moves of one request in some heads of one layer."""
    cache_at = tl.load(addresses_at + tl.program_id(1)).to(tl.pointer_type(BITS))
    first = tl.program_id(0).to(tl.int64) * request_stride
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, PADDED)
    cache_at += head.to(tl.int64)[:, None] * head_stride + place[None, :] * content_stride
    for move in range(moves):
        source = tl.load(sources_at + first + move * move_stride).to(tl.int64)
        target = tl.load(targets_at + first + move * move_stride).to(tl.int64)
        last = tl.where(source >= 0, heads, 0)
        chosen = (head < last)[:, None] & (place < CONTENT)[None, :]
        token = tl.load(cache_at + (source // BLOCK * block_stride + source % BLOCK * token_stride), chosen, 0)
        tl.debug_barrier()  # all of a token is read before any of it may be written over by a later move
        tl.store(cache_at + (target // BLOCK * block_stride + target % BLOCK * token_stride), token, chosen)
        tl.debug_barrier()  # and written before it may be read
