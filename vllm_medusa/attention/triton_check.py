"""A look at the kernels on the GPU that is to serve, before it serves: both against plain arithmetic on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_medusa.attention.reference import reference_attention
from vllm_medusa.attention.triton import tree_attention
from vllm_medusa.attention.triton_mover import SlotMover
from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.tensors import climb
from vllm_medusa.tree.topology import Tree

# Of values around 1. A wrong mask, block or stride is off by about 1; rounding by a tenth of these.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def check_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    num_nodes: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    """Let tree attention and the commit work on two random requests in a cache of their own, and compare.

    Args:
        device, dtype: of the engine.
        heads, kv_heads, head_size, block_size: of its layers and their cache.
        num_nodes: of a tree.
        sliding_window, softcap: of its attention.
        sinks: whether its heads have them.
        stored: of its cache, where that is float8.

    Raises:
        MedusaError: what comes out is not what should.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, held_in: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(held_in).to(dtype)

    trees = [_random_tree(num_nodes, generator) for _ in range(2)]
    contexts, rows = torch.tensor([3, 2 * block_size + 5]), num_nodes + 1
    blocks = -(-(int(contexts.max()) + rows) // block_size)
    table = torch.randperm(2 * blocks, generator=generator).view(2, blocks)
    lengths = [int(context) + rows for context in contexts]
    texts = [normal(length, kv_heads, 2 * head_size, held_in=stored or dtype) for length in lengths]
    query = normal(2 * rows, heads, head_size)
    cache = torch.zeros(2 * blocks, kv_heads, block_size, 2 * head_size, dtype=dtype)
    for own, text in zip(table, texts, strict=True):
        slots = torch.arange(len(text))
        cache[own[slots // block_size], :, slots % block_size] = text
    depths, ancestors = climb(torch.tensor([tree.parents for tree in trees]), num_nodes)
    here = cache.to(stored or dtype).to(device)
    out = torch.zeros_like(query, device=device)
    attention: dict[str, Any] = {"scale": head_size**-0.5, "softcap": softcap, "sliding_window": sliding_window}
    extra: dict[str, Any] = {"sinks": normal(heads)} if sinks else {}
    scales = {} if stored is None else {"key_scale": 0.5, "value_scale": 0.25}
    there: dict[str, Any] = {name: tensor.to(device) for name, tensor in extra.items()}
    there |= {name: torch.tensor([scale], device=device) for name, scale in scales.items()}
    tree_attention(
        query.to(device),
        here[..., :head_size],
        here[..., head_size:],
        out,
        block_table=table.to(device, torch.int32),
        context_lens=contexts.to(device),
        query_start_loc=torch.tensor([0, rows, 2 * rows], device=device),
        ancestors=ancestors.flatten(0, 1).to(device),
        depths=depths.flatten().to(device),
        max_rows=rows,
        max_context=int(contexts.max()),
        **attention,
        **there,
    )
    truth = [
        reference_attention(
            rows_of_one,
            text[..., :head_size] * scales.get("key_scale", 1.0),
            text[..., head_size:] * scales.get("value_scale", 1.0),
            tree,
            **attention,
            **extra,
        )
        for rows_of_one, text, tree in zip((query[:rows], query[rows:]), texts, trees, strict=True)
    ]
    error = float((out.cpu().double() - torch.cat(truth)).abs().max())
    if not error < TOLERANCES[dtype]:
        _refuse(f"tree attention is off by {error:.3g}", device)

    moves = torch.arange(1, 3)
    sources, targets = (_slots(table, contexts[:, None] + place, block_size) for place in (moves + 1, moves))
    expected = cache.clone()
    for source, target in zip(sources.T, targets.T, strict=True):  # shallow ones first
        token = expected[source // block_size, :, source % block_size]
        expected[target // block_size, :, target % block_size] = token
    SlotMover([here]).move(sources.to(device), targets.to(device))
    if not torch.equal(here.cpu().to(dtype), expected):
        _refuse("the commit moves other tokens than it should", device)


def _random_tree(num_nodes: int, generator: torch.Generator) -> Tree:
    return Tree(tuple(int(torch.randint(node + 1, (1,), generator=generator)) for node in range(num_nodes)))


def _slots(table: Tensor, places: Tensor, block_size: int) -> Tensor:
    """int64 [R, M], slots of places [R, M] in the texts of requests."""
    return table.gather(1, places // block_size) * block_size + places % block_size


def _refuse(what: str, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    raise MedusaError(f"medusa: on this device ({name}) {what}; serve without Medusa, and tell us (make gpu-check)")
