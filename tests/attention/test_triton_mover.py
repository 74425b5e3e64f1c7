"""The GPU commit, in Triton's interpreter: as if accepted tokens had been written again."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreted import load_interpreted, spoil
from torch import Tensor

LAYERS, HEADS, CONTENT = 3, 5, 24  # neither heads nor content fill their tiles
PATHS = [[2, 3, 5, 9], [1, 2, 6, 8], [4, 5, 6, 7], [1, 2, 3, 4], []]  # accepted rows of each request, by depth


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """attention/triton_mover.py, interpreted."""
    return load_interpreted("triton_mover")


def random_caches(blocks: int, block_size: int, dtype: torch.dtype, order: str) -> list[Tensor]:
    """Logical [blocks, Hkv, block, content] of several layers; any bits at all, NaNs among them."""
    generator = torch.Generator().manual_seed(blocks + block_size)
    shapes = {
        "heads first": (LAYERS, blocks, HEADS, block_size, CONTENT),
        "tokens first": (LAYERS, blocks, block_size, HEADS, CONTENT),
        "layers in a block": (blocks, LAYERS, HEADS, block_size, CONTENT),
    }
    items = torch.Size(shapes[order]).numel() * torch.empty(0, dtype=dtype).element_size()
    whole = torch.randint(0, 256, (items,), dtype=torch.uint8, generator=generator).view(dtype).view(shapes[order])
    if order == "layers in a block":
        return [whole[:, layer] for layer in range(LAYERS)]
    return [layer.transpose(1, 2) if order == "tokens first" else layer for layer in whole]


def lay_moves(blocks: int, block_size: int, context: int) -> tuple[Tensor, Tensor]:
    """(sources, targets) of PATHS, each request with `context` tokens before its root, its blocks anywhere."""
    generator = torch.Generator().manual_seed(context)
    needed = (context + 10) // block_size + 1
    tables = torch.randperm(blocks, generator=generator)[: needed * len(PATHS)].view(len(PATHS), needed)
    sources, targets = (torch.full((len(PATHS), 4), nothing, dtype=torch.int64) for nothing in (-1, 0))
    for request, path in enumerate(PATHS):
        for depth, row in enumerate(path, start=1):
            if row != depth:
                for slots, slot in ((sources, context + row), (targets, context + depth)):
                    slots[request, depth - 1] = tables[request, slot // block_size] * block_size + slot % block_size
    return sources, targets


def written_again(cache: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """What plain writing of kept copies leaves."""
    moved, block_size = cache.clone(), cache.shape[2]
    source, target = sources[sources >= 0], targets[sources >= 0]
    kept = cache[source // block_size, :, source % block_size].clone()
    moved[target // block_size, :, target % block_size] = kept
    return moved


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


def check(gpu: ModuleType, block_size: int, context: int, dtype: torch.dtype, order: str) -> None:
    blocks = len(PATHS) * ((context + 10) // block_size + 1) + 2
    caches = random_caches(blocks, block_size, dtype, order)
    sources, targets = lay_moves(blocks, block_size, context)
    wanted = [written_again(cache, sources, targets) for cache in caches]
    gpu.SlotMover(caches).move(sources, targets)
    for cache, right in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache), bits(right))


@pytest.mark.parametrize("context", range(17))
def test_every_alignment(gpu: ModuleType, context: int) -> None:
    """Sources that are targets too, in the same block, over its border, blocks not adjacent."""
    check(gpu, 16, context, torch.bfloat16, "heads first")


@pytest.mark.parametrize("order", ["heads first", "tokens first", "layers in a block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_caches(gpu: ModuleType, block_size: int, dtype: torch.dtype, order: str) -> None:
    check(gpu, block_size, block_size - 5, dtype, order)


def test_nothing_to_move(gpu: ModuleType) -> None:
    caches = random_caches(4, 16, torch.float32, "heads first")
    before = [bits(cache).clone() for cache in caches]
    nothing = torch.full((2, 3), -1)
    gpu.SlotMover(caches).move(nothing, nothing)
    gpu.SlotMover(caches).move(nothing[:, :0], nothing[:, :0])
    assert all(torch.equal(bits(cache), was) for cache, was in zip(caches, before, strict=True))


FAULTS = {
    "deep ones first": ("+ move * move_stride", "+ (moves - 1 - move) * move_stride"),
    "only the first layer": ("addresses_at + tl.program_id(1)", "addresses_at"),
    "only the first request": ("tl.program_id(0).to(tl.int64) * request_stride", "0"),
    "the last head is forgotten": ("(head < last)", "(head < last - 1)"),
    "content is cut": ("(place < CONTENT)", "(place < CONTENT - 1)"),
    "slots that are none": ("tl.where(source >= 0, heads, 0)", "heads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    spoilt = spoil("triton_mover", *FAULTS[fault], tmp_path, everywhere=True)
    with pytest.raises(AssertionError):
        check(load_interpreted("triton_mover", spoilt=spoilt), 16, 11, torch.bfloat16, "heads first")
