"""Tree attention on a GPU: a Triton kernel over a paged cache. Needs torch and triton, no host.

One program takes a tile of one request's rows, packed with the query heads that share a KV head, and a share of its
keys. Slots up to the root's are seen by every row; a node's slot by the rows whose ancestor bits say so. Shares are
merged by their log-sum-exp. Everything that differs from step to step is read from tensors, so a CUDA graph may hold
the launches. Where the environment says TRITON_INTERPRET=1 the same code runs on a CPU, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from vllm_medusa.attention.triton_kernels import INTERPRETED, attend, merge

SPLITS = (1, 2, 4, 8, 16, 32)  # each is a kernel of its own, to be compiled before it is needed
LEAST_SHARE = 256  # keys that are worth a program of their own
MERGED_ROWS = 16  # rows and heads that a program merges


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: packed rows and keys of a tile, warps of a program, loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int = 2

    @classmethod
    def choose(cls, packed_rows: int, head_size: int, item: int) -> Tiles:
        """For so many packed rows (rows of a request times query heads of a KV head); `item` bytes of a query element.

        A program keeps rows * head_size sums in registers, and two loads of keys and values in shared memory. float32
        is multiplied without tensor cores, for which Triton needs many registers.

        >>> Tiles.choose(256, 128, 2), Tiles.choose(5, 256, 2)
        (Tiles(rows=128, keys=64, warps=8, stages=2), Tiles(rows=16, keys=32, warps=4, stages=2))
        """
        wide = head_size > 128
        most = 16 if item == 4 else 64 if wide else 128
        rows = min(max(16, triton.next_power_of_2(packed_rows)), most)
        return cls(rows, 32 if wide or item == 4 else 64, 8 if (rows > 32 and wide) or rows > 64 else 4)


def choose_splits(programs: int, processors: int, longest: int) -> int:
    """Shares of the keys, so that the GPU's processors have two programs each, of at least LEAST_SHARE keys.

    >>> choose_splits(8, 132, 1024), choose_splits(8, 132, 32768), choose_splits(512, 132, 32768)
    (4, 32, 1)
    """
    most = min(2 * processors // max(programs, 1), longest // LEAST_SHARE)
    return max(splits for splits in SPLITS if splits <= max(1, most))


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    *,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    max_rows: int,
    max_context: int,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = -1,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of all tree rows of R requests in one layer; no value comes back from the device.

    The rows' own keys and values are in the cache already: row r of a request with P cached tokens stands at slot
    P + r, row 0 is the root. Row r sees the prefix, the root, itself and its ancestors.

    Args:
        query: [T, Hq, D], the rows of all requests one after the other; bfloat16, float16 or float32.
        key_cache, value_cache: [blocks, Hkv, block, D] with any strides: the halves of a host's
            [blocks, Hkv, block, 2 D], say. Of the query's dtype, or float8.
        out: [T, Hq, D], filled and returned; rows beyond the requests' are left alone.
        block_table: int32 [R, n], the blocks of each request in order; entries behind its last slot are not read.
        context_lens: int [R], P of each request.
        query_start_loc: int [R + 1], where each request's rows begin; a request may have none.
        ancestors: int64 [T, W], bit i % 64 of word i // 64 = node i is the row or its ancestor; W is 1 or 2.
        depths: int [T]; a row's logical position is P + depth.
        max_rows: no request has more rows than this, at most 129.
        max_context: no request has more cached tokens; only speed depends on it.
        scale, softcap, sliding_window: as in `TreeInputs`.
        key_scale, value_scale: float32, one element or one per KV head, that float8 elements are multiplied by.
        sinks: [Hq], as in `LayerInputs`, of any float dtype.
        splits, tiles: how the work is cut; None chooses.
    """
    rows_in_all, heads, head_size = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    requests, group, words = len(context_lens), heads // kv_heads, ancestors.shape[1]
    assert heads == group * kv_heads and words in (1, 2) and 1 <= max_rows <= 64 * words + 1
    tiles = tiles or Tiles.choose(max_rows * group, head_size, query.element_size())
    row_tiles = triton.cdiv(max_rows * group, tiles.rows)
    if splits is None:
        seen = max_context if sliding_window <= 0 else min(max_context, sliding_window)
        splits = choose_splits(row_tiles * requests * kv_heads, _processors(query.device), seen + max_rows)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, rows_in_all, heads, head_size, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, rows_in_all, heads, dtype=torch.float32, device=query.device)
    strides = [key_cache.stride(), value_cache.stride(), query.stride(), partial.stride()[-3:]]
    attend[(row_tiles, requests * kv_heads, splits)](
        *(query, key_cache, value_cache, partial, lse, block_table, context_lens, query_start_loc, ancestors, depths),
        *(query if own is None else own for own in (key_scale, value_scale, sinks)),
        *(stride for tensor in strides for stride in tensor),
        *(block_table.stride(0), ancestors.stride(0), rows_in_all * heads, kv_heads),
        *(scale, softcap, sliding_window),
        KEY_SCALES=0 if key_scale is None else key_scale.numel(),
        VALUE_SCALES=0 if value_scale is None else value_scale.numel(),
        SINKS=sinks is not None,
        GROUP=group,
        SIZE=head_size,
        PADDED=triton.next_power_of_2(head_size),
        BLOCK=block_size,
        WORDS=words,
        SPLITS=splits,
        SOFTCAP=softcap > 0.0,
        WINDOW=sliding_window > 0,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDE=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        merge[(triton.cdiv(rows_in_all * heads, MERGED_ROWS),)](
            *(partial, lse, out, query_start_loc, query if sinks is None else sinks),
            *(requests, *out.stride(), rows_in_all * heads, heads),
            SINKS=sinks is not None,
            SIZE=head_size,
            PADDED=triton.next_power_of_2(head_size),
            SPLITS=splits,
            WIDTH=triton.next_power_of_2(splits),
            ROWS=MERGED_ROWS,
            WIDE=INTERPRETED,
            num_warps=4,
        )
    return out
