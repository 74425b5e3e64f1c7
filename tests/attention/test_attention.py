"""Both kernels against the float64 truth, on caches that the host's own writer filled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import FLOAT8, SCALES, Step, float8_step, float8_writer, random_tree
from torch import Tensor

from vllm_medusa.attention.cpu import Kernel, learn_layout, tree_attention
from vllm_medusa.attention.inputs import LayerInputs
from vllm_medusa.attention.reference import causal_attention, reference_attention
from vllm_medusa.tree.topology import Tree

SEVERAL = [random_tree(63, 0), random_tree(128, 1, reach_back=8), Tree(()), Tree.chain(5), random_tree(9, 2)]
CONTEXTS = [200, 0, 127, 31, 500]
CACHES = [
    (torch.float32, "vec", 32),
    (torch.float32, "vec", 128),
    (torch.float32, "vec16", 16),
    (torch.float16, "vec", 128),
    (torch.bfloat16, "vec", 32),
    (torch.bfloat16, "amx", 32),
    (torch.bfloat16, "amx", 128),
]
OPTIONS = [{}, {"sliding_window": 40}, {"sliding_window": 3}, {"softcap": 5.0}, {"softcap": 2.0, "sliding_window": 150}]


def tolerance(step: Step, **options: float) -> Tensor:
    """How far a result may be from the truth, per element.

    Half precision: the result is rounded to u = 2^-9 (bfloat16) or 2^-11 of itself, and AMX rounds every weight to
    2^-9 of itself, which moves the result by at most that share of sum(weight * |value|). The second term bounds the
    first. Products of halves are exact in float32, so the rest is float32's own error, far below.

    float32: twice the largest error of a naive float32 implementation. That one may be small by luck (it depends on the
    order in which a library sums up), so two units in the last place of the largest score, and 32 of a result of size
    1, are granted: a score that is off by so much makes a weight, and a value of size 1, as much wrong. `assert_true`
    therefore compares the typical errors too, with two units of size 1 granted, since a naive row of one may be right
    to a third of a unit (Hypothesis found one: 0.8 and 2.7).
    """
    dtype = step.query.dtype
    if dtype == torch.float32:
        truth = step.truth(**options)
        naive = (step.truth(torch.float32, **options) - truth).abs().max()
        score = step.query.norm(dim=2).max() * max(keys.norm(dim=2).max() for keys in step.keys)
        score = score * step.query.shape[2] ** -0.5
        granted = 2.0**-24 * torch.clamp(2 * score * truth.abs().max(), min=32)
        return torch.maximum(2 * naive, granted).expand(step.query.shape)
    sizes = replace(step, values=[value.abs() for value in step.values]).truth(**options)
    rounded = 2 if step.isa == "amx" else 1  # the result, and the weights
    return 1.02 * rounded * torch.finfo(dtype).eps / 2 * sizes + 1e-5


def assert_true(step: Step, out: Tensor, **options: float) -> None:
    """Right per element, and in float32 typically no worse than twice a naive implementation."""
    truth = step.truth(**options)
    error = (out.double() - truth).abs()
    assert not out.isnan().any()
    excess = error - tolerance(step, **options)
    assert (excess <= 0).all(), f"error {error.max():.2e}, {excess.max():.2e} too much"
    if out.dtype == torch.float32:
        naive = step.truth(torch.float32, **options).double() - truth
        assert error.square().mean().sqrt() <= 2 * naive.square().mean().sqrt() + 2 * 2.0**-24


# Of the nine heads of a step: a score as large as its scores are, ones that are drowned, and ones that drown all else.
SINKS = torch.tensor([0.0, 2.0, -3.0, 5.0, -1e4, 9.0, 60.0, 1e4, 1.0])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"softcap": 2.0, "sliding_window": 150}], ids=str)
@pytest.mark.parametrize(("dtype", "isa", "block_size"), [*CACHES[:2], *CACHES[3:5], CACHES[6]], ids=str)
def test_sinks(dtype: torch.dtype, isa: str, block_size: int, options: dict[str, Any], kernel: Kernel) -> None:
    needs(isa)
    step = Step.random(SEVERAL, CONTEXTS, dtype=dtype, isa=isa, block_size=block_size)
    out = step.run(kernel=kernel, sinks=SINKS, **options)
    assert_true(step, out, sinks=SINKS, **options)
    assert out[:, 7].abs().max() == 0.0


@pytest.mark.parametrize("kind", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_caches(dtype: torch.dtype, kind: str, kernel: Kernel) -> None:
    """What the host's writer divided by a layer's scales is multiplied by them, as it packs bytes."""
    needs("avx512")
    step, caches = float8_step(SEVERAL, CONTEXTS, dtype, kind)
    isa, layer = step.isa, LayerInputs(SINKS, *SCALES)
    layout = learn_layout(float8_writer(isa, kind), step.block_size, 64, FLOAT8[kind], dtype)
    plan = step.plan(caches[2], kernel=kernel, layout=layout)
    out = plan.run(step.query, *caches[:2], torch.full_like(step.query, torch.nan), layer)
    assert_true(step, out, sinks=SINKS)


def needs(isa: str) -> None:
    """Skip where the host's attention has no such packing: it asks torch the same."""
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    if isa == "avx512" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM refuses float8 caches here")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "isa", "block_size"), CACHES, ids=str)
def test_several_requests(
    dtype: torch.dtype, isa: str, block_size: int, options: dict[str, float], kernel: Kernel
) -> None:
    needs(isa)
    step = Step.random(SEVERAL, CONTEXTS, dtype=dtype, isa=isa, block_size=block_size)
    assert_true(step, step.run(kernel=kernel, **options), **options)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3), (5, 1), (32, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads(heads: tuple[int, int], dtype: torch.dtype, kernel: Kernel) -> None:
    step = Step.random(SEVERAL[:2], [77, 300], heads=heads, dtype=dtype)
    assert_true(step, step.run(kernel=kernel))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_sizes(head_size: int, dtype: torch.dtype, kernel: Kernel) -> None:
    isa = "vec16" if head_size % 32 else None
    step = Step.random([random_tree(12, 3)], [150], heads=(4, 2), head_size=head_size, dtype=dtype, isa=isa)
    assert_true(step, step.run(kernel=kernel))


@pytest.mark.parametrize(("dtype", "isa"), [(torch.float32, "vec"), (torch.bfloat16, "amx")], ids=str)
def test_long_contexts(dtype: torch.dtype, isa: str, kernel: Kernel) -> None:
    needs(isa)
    step = Step.random([random_tree(16, 4), random_tree(63, 5)], [4096, 1025], dtype=dtype, isa=isa)
    assert_true(step, step.run(kernel=kernel))


@pytest.mark.parametrize(("dtype", "isa", "size"), [(torch.float32, "vec", 1e4), (torch.bfloat16, "amx", 1e4)], ids=str)
def test_what_is_not_an_ancestor_does_not_leak(dtype: torch.dtype, isa: str, size: float, kernel: Kernel) -> None:
    needs(isa)
    tree = random_tree(63, 6, reach_back=12)
    step = Step.random([tree], [100], dtype=dtype, isa=isa)
    before = step.run(kernel=kernel)
    for node in (0, 7, 31, 62):
        row = node + 1
        keys, values = step.keys[0].clone(), step.values[0].clone()
        keys[100 + row], values[100 + row] = size * keys[100 + row], 1e30
        after = replace(step, keys=[keys], values=[values]).run(kernel=kernel)
        sees = torch.tensor([row in tree.path(other) for other in range(tree.num_rows)])
        assert torch.equal(after[~sees], before[~sees])
        assert (after[sees] != before[sees]).any(dim=(1, 2)).all()


def test_a_request_does_not_see_another(kernel: Kernel) -> None:
    together = Step.random(SEVERAL, CONTEXTS)
    out = together.run(kernel=kernel)
    starts = together.query_start_loc.tolist()
    for r, tree in enumerate(SEVERAL):
        rows = slice(starts[r], starts[r + 1])
        alone = Step([tree], [CONTEXTS[r]], together.query[rows], [together.keys[r]], [together.values[r]], 128, "vec")
        assert_true(alone, out[rows])


def test_queries_and_results_may_be_parts_of_wider_tensors(kernel: Kernel) -> None:
    step = Step.random(SEVERAL, CONTEXTS)
    key_cache, value_cache, table = step.store()
    wide = torch.randn(len(step.query), 15, 64)  # queries, keys and values in one, as a fused projection leaves them
    wide[:, :9] = step.query
    out = torch.full((len(step.query), 20, 64), 7.0)
    step.plan(table, kernel=kernel).run(wide[:, :9], key_cache, value_cache, out[:, 3:12])
    assert_true(step, out[:, 3:12])
    assert (out[:, :3] == 7.0).all() and (out[:, 12:] == 7.0).all()


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize(("dtype", "isa"), [(torch.float32, "vec"), (torch.bfloat16, "amx")], ids=str)
def test_any_number_of_threads(dtype: torch.dtype, isa: str, threads: int, kernel: Kernel) -> None:
    """Threads share a long text between them, and a thread takes parts of several requests."""
    needs(isa)
    step = Step.random([random_tree(16, 8), Tree(()), random_tree(40, 9)], [700, 3, 90], dtype=dtype, isa=isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for _ in range(3):  # who finishes last, and so merges, is chance
            out = step.run(kernel=kernel)
    finally:
        torch.set_num_threads(before)
    assert_true(step, out)


def test_a_plan_serves_many_layers(kernel: Kernel) -> None:
    first, second = Step.random(SEVERAL, CONTEXTS, seed=1), Step.random(SEVERAL, CONTEXTS, seed=2)
    second.seed = first.seed  # the same blocks
    key_cache, value_cache, table = first.store()
    plan = first.plan(table, kernel=kernel)
    assert_true(first, plan.run(first.query, key_cache, value_cache, torch.empty_like(first.query)))
    key_cache, value_cache, _ = second.store()
    assert_true(second, plan.run(second.query, key_cache, value_cache, torch.empty_like(second.query)))


def test_one_call_for_one_layer(kernel: Kernel) -> None:
    step = Step.random(SEVERAL, CONTEXTS)
    key_cache, value_cache, table = step.store()
    plan = step.plan(table, kernel=kernel)
    out = tree_attention(step.query, key_cache, value_cache, out=torch.empty_like(step.query), **vars(plan))
    assert_true(step, out)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_step(data: st.DataObject, kernel: Kernel) -> None:
    count = data.draw(st.integers(1, 4), label="requests")
    sizes = data.draw(st.lists(st.integers(0, 128), min_size=count, max_size=count), label="nodes")
    contexts = data.draw(st.lists(st.integers(0, 400), min_size=count, max_size=count), label="contexts")
    back = data.draw(st.sampled_from([1, 3, 10, 128]), label="reach back")
    seed = data.draw(st.integers(0, 2**20), label="seed")
    isa, block_size = data.draw(st.sampled_from([("vec", 32), ("vec", 64), ("vec16", 16)]), label="cache")
    options = {
        "sliding_window": data.draw(st.sampled_from([-1, 1, 2, 17, 100]), label="window"),
        "softcap": data.draw(st.sampled_from([0.0, 3.0]), label="softcap"),
    }
    trees = [random_tree(size, seed + r, reach_back=back) for r, size in enumerate(sizes)]
    step = Step.random(trees, contexts, heads=(4, 2), head_size=32, block_size=block_size, isa=isa, seed=seed)
    assert_true(step, step.run(kernel=kernel, **options), **options)


def test_the_truth_agrees_with_itself_on_a_chain() -> None:
    step = Step.random([Tree.chain(20)], [50])
    keys, values = step.keys[0], step.values[0]
    for options in OPTIONS:
        chain = causal_attention(step.query, keys, values, 0.125, **options)
        assert torch.equal(reference_attention(step.query, keys, values, Tree.chain(20), 0.125, **options), chain)


def test_the_truth_masks_by_ancestors() -> None:
    """The reference unrolls paths; the same by one mask, as the paper draws it (arXiv:2401.10774, figure 2)."""
    tree = random_tree(30, 7, reach_back=9)
    step = Step.random([tree], [11], heads=(2, 2))
    q, k, v = (x.double().transpose(0, 1) for x in (step.query, step.keys[0], step.values[0]))
    visible = torch.zeros(31, 42, dtype=torch.bool)
    visible[:, :12] = True
    for row in range(31):
        visible[row, [11 + seen for seen in tree.path(row)]] = True
    masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(step.truth(), masked.transpose(0, 1), rtol=1e-12, atol=1e-12)
