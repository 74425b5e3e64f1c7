"""Grown trees against a heap that knows nothing of tensors."""

import heapq
import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.growth import grow_dynamic, grow_static
from vllm_medusa.tree.topology import Tree


def best_first(table: np.ndarray, num_nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """(reach, path) of the likeliest nodes, products in float32 as the fast path takes them."""
    heads, top_k = table.shape
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    found = []
    while heap and len(found) <= num_nodes:
        minus, _, path = heapq.heappop(heap)
        found.append((-minus, path))
        if len(path) < heads:
            for rank in range(top_k):
                reach = np.float32(-minus) * table[len(path), rank]
                heapq.heappush(heap, (-float(reach), len(path) + 1, (*path, rank)))
    return found[1:]


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(tree.ranks[row - 1] for row in tree.path(node + 1)) for node in range(tree.num_nodes)]


def tables(min_value: float, max_value: float) -> st.SearchStrategy[np.ndarray]:
    def shaped(shape: tuple[int, int]) -> st.SearchStrategy[np.ndarray]:
        values = st.floats(min_value, max_value, width=32)
        row = st.lists(values, min_size=shape[1], max_size=shape[1]).map(lambda r: sorted(r, reverse=True))
        return st.lists(row, min_size=shape[0], max_size=shape[0]).map(lambda t: np.array(t, dtype=np.float32))

    return st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(shaped)


def check_dynamic(table: np.ndarray, num_nodes: int, grown_row: tuple[torch.Tensor, ...]) -> None:
    parents, ranks, depths, reach = (column.tolist() for column in grown_row)
    oracle = best_first(table, num_nodes)
    real = len(oracle)
    tree = Tree(tuple(parents[:real]), tuple(ranks[:real]))  # checks that parents come first and ranks are distinct
    assert depths[:real] == list(tree.depths[1:])
    assert parents[real:] == [-1] * (num_nodes - real) and reach[real:] == [0.0] * (num_nodes - real)
    # Equal products may come in another order, but the reaches may not differ, nor from their own paths.
    assert reach[:real] == [value for value, _ in oracle]
    for path, value in zip(paths_of(tree), reach, strict=False):
        product = np.float32(1)
        for head, rank in enumerate(path):
            product *= table[head, rank]
        assert product == np.float32(value)


@given(tables(0.0, 1.0), st.integers(1, 40))
def test_dynamic_equals_heap(table: np.ndarray, num_nodes: int) -> None:
    grown = grow_dynamic(torch.from_numpy(table)[None], num_nodes)
    check_dynamic(table, num_nodes, tuple(column[0] for column in grown))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 128), st.sampled_from([0.0, 0.5, 1.0]))
def test_dynamic_keeps_parents_first_among_equals(heads: int, top_k: int, num_nodes: int, value: float) -> None:
    table = np.full((heads, top_k), value, dtype=np.float32)
    check_dynamic(
        table, num_nodes, tuple(column[0] for column in grow_dynamic(torch.from_numpy(table)[None], num_nodes))
    )


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 128))
def test_dynamic_batches(seed: int, batch: int, num_nodes: int) -> None:
    logits = torch.randn(batch, 4, 10, generator=torch.Generator().manual_seed(seed)) * 3
    probabilities = logits.softmax(-1).sort(dim=-1, descending=True).values
    grown = grow_dynamic(probabilities, num_nodes)
    for i in range(batch):
        check_dynamic(probabilities[i].numpy(), num_nodes, tuple(column[i] for column in grown))


def test_dynamic_prefixes_are_smaller_trees() -> None:
    probabilities = torch.rand(3, 4, 10).sort(dim=-1, descending=True).values / 4
    large, small = grow_dynamic(probabilities, 40), grow_dynamic(probabilities, 12)
    assert all(torch.equal(a[:, :12], b) for a, b in zip(large, small, strict=True))


def test_dynamic_survives_nan() -> None:
    grown = grow_dynamic(torch.full((2, 3, 4), float("nan")), 8)
    for row in range(2):
        assert Tree(tuple(grown.parents[row].tolist()), tuple(grown.ranks[row].tolist())).num_nodes == 8


@given(tables(0.015625, 1.0), st.integers(1, 40))
def test_static_equals_heap(table: np.ndarray, num_nodes: int) -> None:
    tree = grow_static(table.tolist(), num_nodes)
    reach = [float(np.prod([float(table[d, r]) for d, r in enumerate(path)])) for path in paths_of(tree)]
    oracle = [value for value, _ in best_first(table, num_nodes)]
    np.testing.assert_allclose(reach, oracle, rtol=1e-6)  # the oracle multiplies in float32
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(reach))


def test_static_leaves_out_what_is_never_right() -> None:
    assert grow_static([[0.5, 0.0], [0.0, 0.0]], 10) == Tree((0,))


@pytest.mark.parametrize(
    ("table", "num_nodes", "message"),
    [
        ([[1.5]], 4, "between 0 and 1"),
        ([[float("nan")]], 4, "between 0 and 1"),
        ([[0.0, 0.0], [0.5, 0.1]], 4, "never right"),
        ([], 4, "never right"),
        ([[0.5]], 0, "num_speculative_tokens=0"),
        ([[0.5]], 129, "num_speculative_tokens=129"),
    ],
)
def test_static_refuses(table: list[list[float]], num_nodes: int, message: str) -> None:
    with pytest.raises(MedusaError, match=message):
        grow_static(table, num_nodes)


def test_dynamic_is_cheap_enough_to_run_every_step() -> None:
    """A step takes tens of milliseconds; 16 nodes for 8 requests must stay far below one (80 us measured)."""
    probabilities = torch.rand(8, 4, 10).sort(dim=-1, descending=True).values
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        grow_dynamic(probabilities, 16)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3  # generous: machines that run tests are busy
