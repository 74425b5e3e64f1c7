"""The learnt packing against the host's own writer."""

from __future__ import annotations

import pytest
import torch
from steps import host_writer
from test_attention import needs
from torch import Tensor

from vllm_medusa.attention.cpu import KeyLayout, learn_layout
from vllm_medusa.errors import MedusaError

CACHES = [
    ("vec", 32, 64, torch.float32),
    ("vec", 128, 64, torch.float32),
    ("vec", 128, 128, torch.float16),
    ("vec", 96, 64, torch.bfloat16),
    ("vec16", 16, 80, torch.float32),
    ("vec16", 48, 112, torch.bfloat16),
    ("amx", 32, 64, torch.bfloat16),
    ("amx", 128, 96, torch.bfloat16),
]


@pytest.mark.parametrize(("isa", "block_size", "head_size", "dtype"), CACHES)
def test_every_element_is_found_where_the_host_put_it(
    isa: str, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    needs(isa)
    write = host_writer(isa)
    layout = learn_layout(write, block_size, head_size, dtype)
    assert (layout.block_size, layout.head_dim) == (block_size, head_size)
    assert layout.separable
    # Several blocks and heads, tokens written one by one in any order, as serving does.
    cache = torch.zeros(3, 2, 2 * block_size, head_size, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.randperm(3 * block_size)
    keys, values = torch.randn(2, len(slots), 2, head_size).to(dtype)
    for at in range(len(slots)):
        write(keys[at : at + 1], values[at : at + 1], key_cache, value_cache, slots[at : at + 1])
    for told, stored, places in ((keys, key_cache, layout.keys), (values, value_cache, layout.values)):
        found = stored.flatten(2)[:, :, places]  # [blocks, Hkv, block_size, D]
        by_slot = found.transpose(1, 2).flatten(0, 1)
        assert torch.equal(by_slot[slots], told)


def test_a_host_that_does_not_pack() -> None:
    def write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        key_cache[0].transpose(0, 1)[slots] = keys
        value_cache[0].transpose(0, 1)[slots] = values

    layout = learn_layout(write, 32, 64, torch.float16)
    plain = KeyLayout.row_major(32, 64)
    assert torch.equal(layout.keys, plain.keys) and torch.equal(layout.values, plain.values)


def test_a_host_that_loses_elements_is_refused() -> None:
    def write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        key_cache[0].transpose(0, 1)[slots] = keys // 2
        value_cache[0].transpose(0, 1)[slots] = values

    with pytest.raises(MedusaError, match="kv_cache_dtype"):
        learn_layout(write, 32, 64, torch.float32)
