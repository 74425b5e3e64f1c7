"""The GPU kernel, in Triton's interpreter, against the float64 truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import ORDERS, load_interpreted, paged_store, spoil
from steps import Step, random_tree
from torch import Tensor

from vllm_medusa.tree.topology import Tree

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEVERAL = [random_tree(63, 0), random_tree(128, 1, reach_back=8), Tree(()), Tree.chain(5)]
CONTEXTS = [100, 0, 63, 31]
OPTIONS: list[dict[str, float]] = [
    {},
    {"sliding_window": 20},
    {"sliding_window": 3},
    {"softcap": 5.0},
    {"softcap": 30.0, "sliding_window": 80},
]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """attention/triton.py, interpreted."""
    return load_interpreted("triton_kernels", "triton")


def run(
    gpu: ModuleType,
    step: Step,
    store: tuple[Tensor, Tensor, Tensor] | None = None,
    block_size: int = 16,
    **options: Any,
) -> Tensor:
    """What the kernel says; rows that it does not write stay NaN."""
    key_cache, value_cache, table = store or paged_store(step, block_size)
    plan = step.plan(table, layout=None)
    arguments = {
        "block_table": table,
        "context_lens": plan.context_lens.to(torch.int32),
        "query_start_loc": plan.query_start_loc.to(torch.int32),
        "ancestors": plan.ancestors,
        "depths": plan.depths.to(torch.int32),
        "max_rows": max(tree.num_rows for tree in step.trees),
        "max_context": max(step.contexts),
        "scale": step.query.shape[2] ** -0.5,
        "tiles": gpu.Tiles(64, 64, 4),  # few programs: each costs the interpreter milliseconds
    }
    out = torch.full_like(step.query, torch.nan)
    result: Tensor = gpu.tree_attention(step.query, key_cache, value_cache, out, **{**arguments, **options})
    assert result is out
    return out


def assert_true(step: Step, out: Tensor, **options: float) -> None:
    """Errors are at most twice those of the naive formula computed in the same dtype: the largest, and the typical one.

    The naive one may be right by luck, so 32 units in the last place of a result of size 1 are granted in float32 (as
    for the CPU's kernels), and in half precision the rounding of the largest result.
    """
    truth, dtype = step.truth(**options), out.dtype
    naive = (step.truth(dtype, **options).double() - truth).abs()
    error = (out.double() - truth).abs()
    unit = torch.finfo(dtype).eps / 2
    granted = 32 * unit if dtype == torch.float32 else unit * float(truth.abs().max())
    assert not out.isnan().any()
    assert error.max() <= max(2 * naive.max(), granted), f"{error.max():.2e}, naive {naive.max():.2e}"
    typical = error.square().mean().sqrt()
    assert typical <= 2 * naive.square().mean().sqrt() + 2 * unit * (dtype == torch.float32)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(dtype, o) for dtype, some in zip(DTYPES, (OPTIONS, OPTIONS[::2], OPTIONS[::4]), strict=True) for o in some],
    ids=str,
)
def test_several_requests(gpu: ModuleType, dtype: torch.dtype, options: dict[str, float]) -> None:
    step = Step.random(SEVERAL, CONTEXTS, heads=(4, 2), dtype=dtype)
    splits = 1 if options == {} else 2
    assert_true(step, run(gpu, step, splits=splits, **options), **options)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_head_sizes(gpu: ModuleType, dtype: torch.dtype, head_size: int) -> None:
    step = Step.random([random_tree(12, 3)], [70], heads=(4, 2), head_size=head_size, dtype=dtype)
    for splits in (1, 2):
        assert_true(step, run(gpu, step, splits=splits, tiles=None))  # as chosen for this size


@pytest.mark.parametrize(
    ("block_size", "order"),
    [*((size, ORDERS[0]) for size in (16, 32, 48, 64, 128, 256)), *((16, o) for o in ORDERS[1:])],
)
def test_block_sizes_and_strides(gpu: ModuleType, block_size: int, order: str) -> None:
    step = Step.random([random_tree(12, 3), Tree.chain(3)], [300, 17], heads=(2, 2))
    assert_true(step, run(gpu, step, paged_store(step, block_size, order)))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3), (5, 1), (32, 1)], ids=str)
def test_groups_of_query_heads(gpu: ModuleType, heads: tuple[int, int]) -> None:
    step = Step.random([random_tree(20, 4), Tree(())], [40, 3], heads=heads)
    assert_true(step, run(gpu, step))


@pytest.mark.parametrize("nodes", [1, 63, 64, 65, 128])
def test_ancestor_words(gpu: ModuleType, nodes: int) -> None:
    """Up to 64 nodes in one word, up to 128 in two; a chain has every bit set."""
    for tree in (random_tree(nodes, 5, reach_back=20), Tree.chain(nodes)):
        step = Step.random([tree], [10], heads=(2, 1))
        assert_true(step, run(gpu, step))


SINKS = torch.tensor([0.0, 3.0, -1e4, 1e4])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_sinks(gpu: ModuleType, dtype: torch.dtype, splits: int) -> None:
    """In the query's own dtype, as models have them; once in the kernel, once where shares are merged."""
    options = {"sinks": SINKS.to(dtype), "sliding_window": 20, "softcap": 5.0}
    step = Step.random(SEVERAL[:2], CONTEXTS[:2], heads=(4, 2), dtype=dtype)
    out = run(gpu, step, splits=splits, **options)
    assert_true(step, out, **options)
    assert out[:, 3].abs().max() == 0.0


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_float8_caches(gpu: ModuleType, dtype: torch.dtype, stored: torch.dtype, per_head: bool) -> None:
    step = Step.random([random_tree(30, 6), Tree.chain(3)], [60, 20], heads=(4, 2), dtype=dtype)
    scales = torch.tensor([[0.5, 0.02], [0.03, 0.4]]) if per_head else torch.tensor([[0.5], [0.03]])
    kept = [
        [(x / s[:, None]).to(stored).float() for x in part]
        for part, s in zip((step.keys, step.values), scales, strict=True)
    ]
    packed = replace(step, keys=kept[0], values=kept[1])
    told = replace(
        step,
        keys=[x * scales[0][:, None] for x in kept[0]],
        values=[x * scales[1][:, None] for x in kept[1]],
    )
    store = paged_store(packed, 16, dtype=stored)
    for splits in (1, 2):
        out = run(gpu, step, store, key_scale=scales[0], value_scale=scales[1], splits=splits)
        assert_true(told, out)


def test_a_cache_in_another_dtype_than_the_query(gpu: ModuleType) -> None:
    """Float8 without scales."""
    step = Step.random([random_tree(9, 7)], [30], heads=(2, 2), dtype=torch.bfloat16)
    told = replace(
        step,
        **{part: [x.to(torch.float8_e5m2).to(x.dtype) for x in getattr(step, part)] for part in ("keys", "values")},
    )
    assert_true(told, run(gpu, step, paged_store(told, 16, dtype=torch.float8_e5m2)))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=str)
def test_more_shares_than_keys(gpu: ModuleType, options: dict[str, float]) -> None:
    step = Step.random([Tree.chain(2), random_tree(20, 8)], [0, 60], heads=(2, 1))
    for splits in (2, 9):
        assert_true(step, run(gpu, step, splits=splits, tiles=gpu.Tiles(16, 16, 4), **options), **options)


def test_requests_without_rows_and_rows_without_a_request(gpu: ModuleType) -> None:
    """A padded batch, as a CUDA graph replays it."""
    step = Step.random([Tree.chain(3), random_tree(6, 9)], [20, 9], heads=(2, 1))
    key_cache, value_cache, table = paged_store(step, 16)
    plan = step.plan(table, layout=None)
    padded = {
        "block_table": torch.cat([table, torch.full_like(table[:1], 2**30)])[[0, 2, 1, 2]],
        "context_lens": torch.tensor([20, 7, 9, 0]),
        "query_start_loc": torch.tensor([0, 4, 4, 11, 11]),
        "ancestors": torch.cat([plan.ancestors, torch.full((5, 1), -1)]),
        "depths": torch.cat([plan.depths, torch.full((5,), 99)]),
    }
    wide = replace(step, query=torch.cat([step.query, torch.full((5, 2, 64), torch.nan)]))
    for splits in (1, 2):
        out = run(gpu, wide, (key_cache, value_cache, table), splits=splits, **padded, max_rows=65)
        assert_true(step, out[:11])
        assert out[11:].isnan().all(), "left as it was"


def test_queries_and_results_may_be_parts_of_wider_tensors(gpu: ModuleType) -> None:
    step = Step.random([random_tree(6, 9)], [9], heads=(2, 1))
    key_cache, value_cache, table = paged_store(step, 16)
    wide = torch.randn(7, 5, 64)
    wide[:, 1:3] = step.query
    for splits in (1, 2):
        out = torch.full((7, 4, 64), 7.0)
        step.query = wide[:, 1:3]
        plan = step.plan(table, layout=None)
        gpu.tree_attention(
            *(step.query, key_cache, value_cache, out[:, 1:3]),
            **{name: getattr(plan, name) for name in ("context_lens", "query_start_loc", "ancestors", "depths")},
            **{"block_table": table, "max_rows": 7, "max_context": 9, "scale": 0.125, "splits": splits},
        )
        assert_true(step, out[:, 1:3])
        assert (out[:, :1] == 7.0).all() and (out[:, 3:] == 7.0).all()


def test_what_is_not_an_ancestor_does_not_leak(gpu: ModuleType) -> None:
    tree = random_tree(63, 6, reach_back=12)
    step = Step.random([tree], [30], heads=(2, 1))
    before = run(gpu, step, splits=2)
    for node in (0, 31, 62):
        row = node + 1
        keys, values = step.keys[0].clone(), step.values[0].clone()
        keys[30 + row], values[30 + row] = 1e4 * keys[30 + row], 1e30
        after = run(gpu, replace(step, keys=[keys], values=[values]), splits=2)
        sees = torch.tensor([row in tree.path(other) for other in range(tree.num_rows)])
        assert torch.equal(after[~sees], before[~sees])
        assert (after[sees] != before[sees]).any(dim=(1, 2)).all()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_step(gpu: ModuleType, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 2), label="requests")
    sizes = data.draw(st.lists(st.integers(0, 128), min_size=count, max_size=count), label="nodes")
    contexts = data.draw(st.lists(st.integers(0, 100), min_size=count, max_size=count), label="contexts")
    back = data.draw(st.sampled_from([1, 3, 10, 128]), label="reach back")
    seed = data.draw(st.integers(0, 2**20), label="seed")
    options = {
        "sliding_window": data.draw(st.sampled_from([-1, 1, 2, 17, 100]), label="window"),
        "softcap": data.draw(st.sampled_from([0.0, 3.0, 50.0]), label="softcap"),
    }
    splits = data.draw(st.integers(1, 3), label="splits")
    tiles = gpu.Tiles(*data.draw(st.sampled_from([(32, 64), (64, 16)]), label="tiles"), 4)
    trees = [random_tree(size, seed + r, reach_back=back) for r, size in enumerate(sizes)]
    step = Step.random(trees, contexts, heads=(2, 1), seed=seed)
    assert_true(step, run(gpu, step, splits=splits, tiles=tiles, **options), **options)


def check_everything(gpu: ModuleType) -> None:
    """One step in which nearly every line of the kernels matters: the window is narrower than the tree is deep."""
    options = {"sliding_window": 12, "softcap": 50.0}
    step = Step.random([random_tree(70, 1, reach_back=3), Tree.chain(5)], [60, 20], heads=(4, 2))
    assert_true(step, run(gpu, step, splits=3, tiles=gpu.Tiles(64, 16, 4), **options), **options)


FAULTS = {
    "the second word of ancestors is not read": ("high[:, None]) if WORDS", "low[:, None]) if WORDS"),
    "nodes are counted from the root": ("node = slots - nodes_begin", "node = slots - context"),
    "nodes see all nodes": ("seen = seen & (((word >>", "seen = seen | (((word >>"),
    "windows by slot, not by depth": ("oldest = context + depth - window", "oldest = context + 0 * depth - window"),
    "windows by the depth of another node": ("first + 1 + node", "first + node"),
    "windows one too wide": ("position[None, :] > oldest", "position[None, :] >= oldest"),
    "texts without a window": ("seen = seen & (position", "seen = seen & (nodes == 0) | (position"),
    "the soft cap is of another size": ("softcap * _tanh(scores / softcap)", "softcap * _tanh(scores)"),
    "the soft cap loses small scores": ("square < 0.04", "square < 0.0"),
    "old sums are not rescaled": ("sums *= kept[:, None]", "sums *= 1.0"),
    "old totals are not rescaled": ("total = total * kept +", "total = total +"),
    "the heads of another group": ("head = kv_head * GROUP + packed % GROUP", "head = packed % GROUP"),
    "the blocks of another request": ("request.to(tl.int64) * table_row", "0 * table_row"),
    "shares overlap": ("begin += split * share", "begin += split * (share - 1)"),
    "a share too short": ("end = tl.minimum(begin + share, length)", "end = tl.minimum(begin + share, length - 1)"),
    "shares count alike": ("weights = tl.exp2(own - best)", "weights = tl.exp2(own - own)"),
}
SINK_FAULTS = {
    "sinks are left out": ("if SINKS and SPLITS == 1", "if SINKS and SPLITS == 0"),
    "every share has a sink": ("if SINKS and SPLITS == 1", "if SINKS"),
    "the sinks of the first heads": ("sinks_at + head,", "sinks_at + packed % GROUP,"),
    "merged by the sink of another head": ("sinks_at + places % heads", "sinks_at + places % 2"),
}
FLOAT8_FAULTS = {
    "the first head's scale for all keys": ("kv_head if KEY_SCALES > 1 else 0", "0"),
    "the first head's scale for all values": ("kv_head if VALUE_SCALES > 1 else 0", "0"),
}


def test_without_a_fault_everything_is_right(gpu: ModuleType) -> None:
    check_everything(gpu)


@pytest.mark.parametrize("fault", [*FAULTS, *SINK_FAULTS, *FLOAT8_FAULTS])
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    spoilt = spoil("triton_kernels", *{**FAULTS, **SINK_FAULTS, **FLOAT8_FAULTS}[fault], tmp_path)
    gpu = load_interpreted("triton_kernels", "triton", spoilt=spoilt)
    with pytest.raises(AssertionError):
        if fault in FAULTS:
            check_everything(gpu)
        elif fault in SINK_FAULTS:
            for splits in (1, 3):
                test_sinks(gpu, torch.float32, splits)
        else:
            test_float8_caches(gpu, torch.float32, torch.float8_e5m2, per_head=True)
