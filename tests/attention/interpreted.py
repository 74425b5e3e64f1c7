"""Our Triton modules in Triton's interpreter, beside the real ones; paged caches as GPU backends lay them out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton.experimental.gluon.language  # noqa: F401  all of Triton, before the environment asks for its interpreter
from steps import Step
from torch import Tensor

import vllm_medusa.attention

FOLDER = Path(vllm_medusa.attention.__file__).parent


def load_interpreted(*names: str, spoilt: Path | None = None) -> ModuleType:
    """Copies of attention/`name`.py whose kernels are interpreted; the last one.

    Triton looks at the environment when a kernel is defined, so only these copies are: vLLM in this process is not.

    Args:
        names: those that are imported by others first.
        spoilt: stands in for the first.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in names:
            module, path = f"vllm_medusa.attention.{name}", FOLDER / f"{name}.py"
            spec = importlib.util.spec_from_file_location(module, spoilt if spoilt and name == names[0] else path)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, module, loaded)
            spec.loader.exec_module(loaded)
        return loaded


def spoil(name: str, right: str, wrong: str, folder: Path, *, everywhere: bool = False) -> Path:
    """A copy in `folder` of attention/`name`.py with a planted fault: `wrong` in the one place that says `right`, or in
    all of them."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(right) == 1 or (everywhere and right in source)
    spoilt = folder / "spoilt.py"
    spoilt.write_text(source.replace(right, wrong), encoding="utf-8")
    return spoilt


# Logical [blocks, Hkv, block, 2 D] of a physical cache: heads before tokens, tokens before heads, one of two layers.
ORDERS = ("heads first", "tokens first", "layers in a block")


def paged_store(
    step: Step, block_size: int, order: str = "heads first", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values [blocks, Hkv, block, D], block table) of a step. Unused slots hold NaN, unused entries junk."""
    _, heads, size = step.keys[0].shape
    counts = [-(-len(keys) // block_size) for keys in step.keys]
    generator = torch.Generator().manual_seed(step.seed + 1)
    free = torch.randperm(sum(counts) + 3, generator=generator)
    shape = (len(free), heads, block_size, 2 * size)
    if order == "tokens first":
        cache = torch.full((shape[0], block_size, heads, 2 * size), torch.nan).transpose(1, 2)
    elif order == "layers in a block":
        cache = torch.full((shape[0], 2, *shape[1:]), torch.nan)[:, 1]
    else:
        cache = torch.full(shape, torch.nan)
    table = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
    for request, count in enumerate(counts):
        blocks, free = free[:count], free[count:]
        table[request, :count] = blocks
        slots = torch.arange(len(step.keys[request]))
        both = torch.cat([step.keys[request], step.values[request]], dim=2).float()
        cache[blocks[slots // block_size], :, slots % block_size] = both
    stored = torch.empty_strided(cache.shape, cache.stride(), dtype=dtype or step.query.dtype)
    stored.copy_(cache)
    return stored[..., :size], stored[..., size:], table
