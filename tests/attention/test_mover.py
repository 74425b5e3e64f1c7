"""Tokens moved inside the cache are where the host's own writer would have put them."""

from __future__ import annotations

import pytest
import torch
from steps import host_writer, layout_of
from test_attention import needs

from vllm_medusa.attention.native import load_kernel

CACHES = [
    ("vec", 32, 64, torch.float32),
    ("vec", 128, 128, torch.float16),
    ("vec", 96, 64, torch.bfloat16),
    ("amx", 32, 64, torch.bfloat16),
    ("amx", 128, 96, torch.bfloat16),
]


@pytest.mark.parametrize(("isa", "block_size", "head_size", "dtype"), CACHES)
def test_as_if_written_again(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> None:
    needs(isa)
    kernel, layout = load_kernel(), layout_of(isa, block_size, head_size, dtype)
    if kernel is None or not kernel.supports(dtype, layout):
        pytest.skip("no compiled kernel")
    torch.manual_seed(block_size + head_size)
    layers, blocks, heads = 3, 5, 2
    count = blocks * block_size
    caches = [torch.zeros(blocks, heads, 2 * block_size, head_size, dtype=dtype) for _ in range(layers)]
    halves = [cache.chunk(2, dim=2) for cache in caches]
    told = [torch.randn(2, count, heads, head_size).to(dtype) for _ in range(layers)]
    write = host_writer(isa)
    for (keys, values), (k, v) in zip(halves, told, strict=True):
        write(k, v, keys, values, torch.arange(count))
    wanted = [cache.clone() for cache in caches]
    # A path's moves: ascending, a target may be an earlier source; over block borders, and one that stays.
    sources = torch.tensor([3, 5, 6, block_size + 2, 2 * block_size - 1, 2 * block_size + 9, 4 * block_size, count - 1])
    targets = torch.tensor([1, 3, 4, 5, block_size, 2 * block_size - 1, 4 * block_size, count - block_size - 1])
    for cache, (k, v) in zip(wanted, told, strict=True):
        write(k[sources], v[sources], *cache.chunk(2, dim=2), targets)
    kernel.mover(layout, halves).move(sources, targets)
    for found, cache in zip(caches, wanted, strict=True):
        assert torch.equal(found, cache)
