"""How fast the GPU's kernels are for one layer of Llama-3-8B, beside what else is there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import Case, Step, build
from torch import Tensor

from vllm_medusa.attention.triton import Tiles, tree_attention
from vllm_medusa.attention.triton_mover import SlotMover

NODES, CONTEXTS, BATCHES, LAYERS = 63, (1024, 8192, 32768), (1, 16), 32
Run = Callable[[], Any]
TILES = [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3)]
TILES += [Tiles(128, 128, 8, 2)]


def milliseconds(run: Run, repeats: int = 30) -> float:
    """Median time of a call on the GPU, with nothing of the one before in its L2 cache."""
    flush = torch.empty(256 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    times = []
    for repeat in range(5 + repeats):
        flush.zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        if repeat >= 5:
            times.append(began.elapsed_time(ended))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def counted(case: Case) -> tuple[int, int]:
    """(bytes, operations): keys and values of a request read once, queries in, results out; two products."""
    rows = sum(case.nodes) + len(case.nodes)
    seen = sum(case.contexts) + rows
    moved = 2 * (seen * case.heads[1] * 2 * case.head_size + 2 * rows * case.heads[0] * case.head_size)
    work = sum(
        4 * (n + 1) * (c + n + 1) * case.heads[0] * case.head_size
        for n, c in zip(case.nodes, case.contexts, strict=True)
    )
    return moved, work


def flat_cache(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, rows, Hq, D], keys and values [B, L, Hkv, D] of the same step, as kernels without pages take them."""
    case = step.case
    query = step.query.view(len(case.nodes), NODES + 1, case.heads[0], case.head_size)
    halves = zip(*(step.text(request) for request in range(len(case.nodes))), strict=True)
    keys, values = (torch.stack([x.to(case.dtype) for x in half]).transpose(1, 2).contiguous() for half in halves)
    return query, keys, values


def torch_causal(step: Step) -> Run:
    """torch's own attention of as many tokens, each seeing those before it."""
    from torch.nn.attention.bias import causal_lower_right

    query, keys, values = (x.transpose(1, 2) for x in flat_cache(step))
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def flash_causal(step: Step) -> Run:
    """The same by flash-attn, which splits long texts."""
    from flash_attn import flash_attn_with_kvcache

    query, keys, values = flat_cache(step)
    lengths = torch.full((len(query),), keys.shape[1], dtype=torch.int32, device=query.device)
    return lambda: flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, causal=True)


def xformers_tree(step: Step) -> Run:
    """Tree attention by xformers; it takes one tree for all requests, here the first one's."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as theirs

    query, *flat = flat_cache(step)
    (batch, rows), group, context = query.shape[:2], step.case.heads[0] // step.case.heads[1], step.case.contexts[0]
    prefix = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[rows] * batch, kv_padding=context, kv_seqlen=[context] * batch
    ).to(query.device)
    sees = step.visible(0, context)[:, context:]
    bias = torch.zeros(sees.shape, dtype=query.dtype, device=query.device).masked_fill(~sees, -torch.inf)
    parts = [
        x[:, part].contiguous()[:, :, :, None].expand(-1, -1, -1, group, -1)
        for part in (slice(context, None), slice(context))
        for x in flat
    ]
    return lambda: theirs(query.unflatten(2, (-1, group)), *parts, bias, prefix)


OTHERS = {"torch causal ms": torch_causal, "flash-attn causal ms": flash_causal, "xformers tree ms": xformers_tree}


def measure() -> dict[str, Any]:
    """Times by context and batch, the best tiles, the commit; printed as they come."""
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e9:,.0f} GB/s")
    cells = []
    for context in CONTEXTS:
        for batch in BATCHES:
            step = build(Case([NODES] * batch, [context] * batch), "cuda")
            moved, work = counted(step.case)
            out = torch.empty_like(step.query)
            ours = milliseconds(lambda step=step, out=out: step.attend(tree_attention, out))
            cell: dict[str, Any] = {"context": context, "batch": batch, "ms": round(ours, 4), "bytes": moved}
            cell |= {
                "operations": work,
                "gb_per_s": round(moved / ours / 1e6),
                "of_copy": round(moved / ours * 1e3 / bandwidth, 3),
            }
            for name, prepare in OTHERS.items():
                try:
                    cell[name] = round(milliseconds(prepare(step)), 4)
                except ImportError:
                    cell[name] = None  # not here
                except Exception as error:  # noqa: BLE001 (a stranger's kernel may refuse)
                    cell[name] = f"{type(error).__name__}: {error}"[:200]
            print(cell, flush=True)
            cells.append(cell)
    step = build(Case([NODES] * 16, [8192] * 16), "cuda")
    out = torch.empty_like(step.query)
    tiles = {str(t): round(milliseconds(lambda t=t: step.attend(tree_attention, out, tiles=t)), 4) for t in TILES}
    print(f"tiles at 8,192 tokens, batch 16: {tiles}")
    caches = [torch.zeros(256, 8, 16, 256, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    mover = SlotMover(caches)
    sources = torch.arange(2, 16 * 256, 256, device="cuda")[:, None] + 2 * torch.arange(4, device="cuda")
    targets = torch.arange(1, 16 * 256, 256, device="cuda")[:, None] + torch.arange(4, device="cuda")
    commit = milliseconds(lambda: mover.move(sources, targets))
    print(f"commit of 4 tokens, 16 requests, {LAYERS} layers: {1e3 * commit:.1f} µs")
    return {
        "copy_gb_per_s": round(bandwidth / 1e9),
        "attention": cells,
        "tiles_ms": tiles,
        "commit_us": round(1e3 * commit, 1),
    }
