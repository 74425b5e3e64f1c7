"""The Triton kernels of tree attention; triton.py, beside this file, launches them."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 as whole numbers, and cuts where a GPU rounds. There, WIDE hands
# it float32 that holds the same values, rounded.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Reductions name the combining function: the interpreter knows these two, and `tl.max` and `tl.sum` are functions of
# Triton's that run in it only if Triton was imported for it.


@triton.jit
def _tanh(x):
    """Without cancellation near 0, where a score's precision would go."""
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.04, small, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))


@triton.jit
def _round(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """float32 in another dtype."""
    if WIDE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


# What differs from step to step is not compiled in: the host compiles nothing while it serves.
@triton.jit(do_not_specialize=["rows_and_heads"])
def attend(
    query_at,
    key_at,
    value_at,
    out_at,
    lse_at,
    table_at,
    context_at,
    start_at,
    bits_at,
    depth_at,
    key_scale_at,
    value_scale_at,
    sinks_at,
    key_block,
    key_head,
    key_token,
    key_dim,
    value_block,
    value_head,
    value_token,
    value_dim,
    query_row,
    query_head,
    query_dim,
    out_row,
    out_head,
    out_dim,
    table_row,
    bits_row,
    rows_and_heads,
    kv_heads,
    scale,
    softcap,
    window,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of rows of one request and KV head, over one share of the keys."""
    request = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    first = tl.load(start_at + request).to(tl.int32)
    rows = tl.load(start_at + request + 1).to(tl.int32) - first
    if tl.program_id(0) * ROWS >= rows * GROUP:
        return
    context = tl.load(context_at + request).to(tl.int32)
    packed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = packed < rows * GROUP
    row = (first + packed // GROUP).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    dims = tl.arange(0, PADDED)
    inside = live[:, None] & (dims < SIZE)[None, :]
    query_at += row[:, None] * query_row + head[:, None] * query_head + dims[None, :] * query_dim
    query = tl.load(query_at, inside, 0.0)
    depth = tl.load(depth_at + row, live, 0)
    low = tl.load(bits_at + row * bits_row, live, 0)
    high = tl.load(bits_at + row * bits_row + WORDS - 1, live, 0)
    key_at += kv_head * key_head + dims[None, :] * key_dim
    value_at += kv_head * value_head + dims[None, :] * value_dim
    table_at += request.to(tl.int64) * table_row
    if KEY_SCALES > 0:
        scale *= tl.load(key_scale_at + (kv_head if KEY_SCALES > 1 else 0))
    oldest = context + depth - window  # positions up to this one are out of the row's window

    begin = tl.maximum(context + 1 - window, 0) if WINDOW else 0
    length = context + rows
    share = ((length - begin + SPLITS - 1) // SPLITS + KEYS - 1) // KEYS * KEYS
    begin += split * share
    end = tl.minimum(begin + share, length)
    nodes_begin = context + 1
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    sums = tl.full((ROWS, PADDED), 0.0, tl.float32)
    for nodes in tl.static_range(2):  # first the slots that every row sees, then the nodes'
        low_end = tl.maximum(begin, nodes_begin) if nodes else begin
        high_end = end if nodes else tl.minimum(end, nodes_begin)
        for start in range(low_end, high_end, KEYS):
            slots = start + tl.arange(0, KEYS)
            there = slots < high_end
            seen = there[None, :]
            if nodes:
                node = slots - nodes_begin
                word = tl.where((node < 64)[None, :], low[:, None], high[:, None]) if WORDS == 2 else low[:, None]
                seen = seen & (((word >> (node % 64)[None, :]) & 1) != 0)
            if WINDOW:
                position = context + tl.load(depth_at + first + 1 + node, there, 0) if nodes else slots
                seen = seen & (position[None, :] > oldest[:, None])
            block = tl.load(table_at + slots // BLOCK, there, 0).to(tl.int64)
            filled = there[:, None] & (dims < SIZE)[None, :]
            places = block * key_block + (slots % BLOCK) * key_token
            keys = tl.load(key_at + places[:, None], filled, 0.0).to(query.dtype)
            places = block * value_block + (slots % BLOCK) * value_token
            values = tl.load(value_at + places[:, None], filled, 0.0).to(query.dtype)
            if WIDE:
                scores = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee") * scale
            else:
                scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            if SOFTCAP:
                scores = softcap * _tanh(scores / softcap)
            scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))  # log2(e): powers of 2 are cheaper
            newest = tl.maximum(best, tl.reduce(scores, 1, tl.standard._elementwise_max))
            above = tl.where(newest > float("-inf"), newest, 0.0)
            weights = tl.exp2(scores - above[:, None])
            kept = tl.exp2(best - above)
            total = total * kept + tl.reduce(weights, 1, tl.standard._sum_combine)
            sums *= kept[:, None]
            weights = _round(weights, query.dtype, WIDE)
            if WIDE:
                sums += tl.dot(weights.to(tl.float32), values.to(tl.float32), input_precision="ieee")
            else:
                sums = tl.dot(weights, values, sums, input_precision="ieee")
            best = newest
    if SINKS and SPLITS == 1:
        total += tl.exp2(tl.load(sinks_at + head, live, 0.0).to(tl.float32) * 1.4426950408889634 - best)
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    if VALUE_SCALES > 0:
        result *= tl.load(value_scale_at + (kv_head if VALUE_SCALES > 1 else 0))
    out_at += row[:, None] * out_row + head[:, None] * out_head + dims[None, :] * out_dim
    if SPLITS > 1:
        share_at = split.to(tl.int64) * rows_and_heads
        tl.store(out_at + share_at * SIZE, result, inside)
        lse = tl.where(total > 0.0, best + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse_at + share_at + row * (kv_heads * GROUP) + head, lse, live)
    else:
        tl.store(out_at, _round(result, out_at.dtype.element_ty, WIDE), inside)


@triton.jit(do_not_specialize=["requests", "rows_and_heads"])
def merge(
    sums_at,
    lse_at,
    out_at,
    start_at,
    sinks_at,
    requests,
    out_row,
    out_head,
    out_dim,
    rows_and_heads,
    heads,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The shares of some rows' heads, weighted by the exponentials that each had seen."""
    last = tl.load(start_at + requests).to(tl.int64) * heads  # behind it are rows of no request
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = places < last
    splits = tl.arange(0, WIDTH)
    lse = tl.load(
        lse_at + splits[:, None] * rows_and_heads + places[None, :],
        (splits < SPLITS)[:, None] & live[None, :],
        float("-inf"),
    )
    best = tl.reduce(lse, 0, tl.standard._elementwise_max)
    best = tl.where(live, best, 0.0)
    dims = tl.arange(0, PADDED)
    total = tl.full((ROWS,), 0.0, tl.float32)
    sums = tl.full((ROWS, PADDED), 0.0, tl.float32)
    for split in range(SPLITS):
        share = places + split * rows_and_heads
        own = tl.load(lse_at + share, live, float("-inf"))
        weights = tl.exp2(own - best)
        total += weights
        # What a share without a visible key has left is not read.
        filled = (own > float("-inf"))[:, None] & (dims < SIZE)[None, :]
        sums += weights[:, None] * tl.load(sums_at + share[:, None] * SIZE + dims[None, :], filled, 0.0)
    if SINKS:
        total += tl.exp2(tl.load(sinks_at + places % heads, live, 0.0).to(tl.float32) * 1.4426950408889634 - best)
    merged = sums / tl.where(live, total, 1.0)[:, None]
    out_at += (places // heads * out_row + places % heads * out_head)[:, None] + (dims * out_dim)[None, :]
    tl.store(out_at, _round(merged, out_at.dtype.element_ty, WIDE), live[:, None] & (dims < SIZE)[None, :])
