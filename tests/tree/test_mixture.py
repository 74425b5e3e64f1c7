"""Trees of two sources against a heap over whole paths, and against trees of the heads alone."""

import heapq
import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.tree import native
from vllm_medusa.tree.growth import grow_dynamic
from vllm_medusa.tree.lookup import Expected
from vllm_medusa.tree.mixture import grow_mixture
from vllm_medusa.tree.topology import Tree

pytestmark = pytest.mark.usefixtures("way")


def random_heads(rng: np.random.Generator, batch: int, heads: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.stack([[rng.permutation(3 * top_k)[:top_k] for _ in range(heads)] for _ in range(batch)])
    shares = np.sort(rng.dirichlet(np.full(top_k + 1, 0.4), (batch, heads))[..., :top_k])[..., ::-1]
    return tokens.astype(np.int64), shares.astype(np.float32)


def random_lookup(rng: np.random.Generator, batch: int, most: int, vocab: int) -> Expected:
    tokens = rng.integers(0, vocab, (batch, most))
    for row in tokens:
        row[int(rng.integers(0, most + 1)) :] = -1
    return Expected(tokens, rng.random((batch, most)).astype(np.float32))


def best_first(tokens: np.ndarray, shares: np.ndarray, expected: np.ndarray, odds: np.ndarray, nodes: int) -> list:
    """(reach, path of tokens) of the likeliest nodes."""
    count = itertools.count()
    heap: list = [(-1.0, next(count), (), True)]
    found: list = []
    while heap and len(found) <= nodes:
        minus, _, path, on_path = heapq.heappop(heap)
        if minus == 0.0:
            break
        found.append((-minus, path))
        depth = len(path)
        share = float(odds[depth]) if on_path and depth < len(expected) and expected[depth] >= 0 else None
        after: dict[int, float] = {}
        if depth < len(tokens):
            after = {int(t): float(p) * (1 - (share or 0.0)) for t, p in zip(tokens[depth], shares[depth], strict=True)}
        if share is not None:
            after[int(expected[depth])] = after.get(int(expected[depth]), 0.0) + share
        for token, chance in after.items():
            right = share is not None and token == expected[depth]
            heapq.heappush(heap, (minus * chance, next(count), (*path, token), right))
    return found[1:]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_likeliest_nodes_are_grown(seed):
    rng = np.random.default_rng(seed)
    batch, heads, top_k = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    most, nodes = int(rng.integers(0, 8)), int(rng.integers(1, 24))
    tokens, shares = random_heads(rng, batch, heads, top_k)
    lookup = random_lookup(rng, batch, most, 3 * top_k)
    grown = grow_mixture(tokens, shares, lookup, nodes)
    for row in range(batch):
        size = int(grown.sizes[row])
        truth = best_first(tokens[row], shares[row], lookup.tokens[row], lookup.odds[row], nodes)
        assert size == len(truth)
        np.testing.assert_allclose(grown.reach[row, :size], [reach for reach, _ in truth], rtol=1e-5, atol=1e-9)
        assert (np.diff(grown.reach[row, :size]) <= 0).all()
        tree = Tree(tuple(grown.parents[row, :size]), tuple(grown.ranks[row, :size]))  # parents first, siblings differ
        paths = [tuple(int(grown.tokens[row, at - 1]) for at in tree.path(node + 1)) for node in range(size)]
        assert len(set(paths)) == size  # no token twice below one parent
        sure = [path for reach, path in truth if reach > (truth[-1][0] if truth else 0) * (1 + 1e-5)]
        assert set(sure) <= set(paths)
        for node, path in enumerate(paths):
            rank, depth = int(grown.ranks[row, node]), len(path) - 1
            assert rank == top_k or tokens[row, depth, rank] == path[-1]
        assert (grown.parents[row, size:] == -1).all()
        assert (grown.tokens[row, size:] == -1).all()


def test_without_a_lookup_it_is_the_heads_tree():
    rng = np.random.default_rng(0)
    for heads, top_k, nodes in ((4, 10, 16), (4, 10, 63), (1, 2, 8), (3, 2, 128)):
        tokens, shares = random_heads(rng, 5, heads, top_k)
        grown = grow_mixture(tokens, shares, Expected.nothing(5), nodes)
        usual = grow_dynamic(torch.from_numpy(shares), nodes)
        there = usual.parents.numpy() >= 0
        assert (grown.parents == usual.parents.numpy()).all()
        assert (grown.ranks[there] == usual.ranks.numpy()[there]).all()
        assert (grown.reach[there] == usual.reach.numpy()[there]).all()


def test_without_heads_it_is_the_lookup_s_chain():
    empty = np.zeros((1, 0, 3), np.int64), np.zeros((1, 0, 3), np.float32)
    lookup = Expected(np.array([[4, 5, -1, 6]]), np.array([[0.5, 1.0, 0.9, 0.9]], dtype=np.float32))
    grown = grow_mixture(*empty, lookup, 8)
    assert grown.tokens[0, :2].tolist() == [4, 5]
    assert grown.sizes.tolist() == [2]


def test_nan_is_no_confidence_and_certainty_is_no_more_than_one():
    tokens = np.array([[[1, 2], [3, 4]]])
    shares = np.array([[[1.0, np.nan], [np.nan, np.nan]]], dtype=np.float32)
    lookup = Expected(np.array([[1, 3, 7]]), np.array([[1.0, 1.0, 1.0]], dtype=np.float32))
    grown = grow_mixture(tokens, shares, lookup, 6)
    assert grown.tokens[0, :3].tolist() == [1, 3, 7]
    assert grown.reach[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert grown.sizes.tolist() == [3]


def test_it_costs_next_to_nothing(way):
    rng = np.random.default_rng(0)
    tokens, shares = random_heads(rng, 32, 4, 10)
    lookup = random_lookup(rng, 32, 16, 30)
    grow_mixture(tokens, shares, lookup, 16)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        grow_mixture(tokens, shares, lookup, 16)
        times.append(time.perf_counter() - began)
    assert min(times) < (2e-3 if way == "compiled" else 0.2)  # 32 requests; about 0.1 ms


def test_both_ways_agree(way):
    """Products may be rounded once or twice; what they decide must not differ otherwise."""
    rng = np.random.default_rng(5)
    tokens, shares = random_heads(rng, 40, 4, 10)
    lookup = random_lookup(rng, 40, 16, 30)
    grown = grow_mixture(tokens, shares, lookup, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        other = grow_mixture(tokens, shares, lookup, 24)
    np.testing.assert_allclose(grown.reach, other.reach, rtol=1e-6)
    assert (grown.sizes == other.sizes).all()
    assert (grown.tokens == other.tokens).mean() > 0.99
