"""Trees made on the device are those that the CPU makes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.lookup import Expected
from vllm_medusa.tree.mixture import grow_mixture
from vllm_medusa.tree.tensor_growth import grow_trees
from vllm_medusa.tree.tensor_lookup import TensorExpected
from vllm_medusa.tree.tensors import climb, fill_tree
from vllm_medusa.tree.topology import Tree, ancestor_masks_of, depths_of


@st.composite
def guesses(draw):
    """Candidates of a few requests, and what their texts expect.

    Tokens [B, K, R]; probabilities [B, K, R] descending, some of them 0; Expected [B, L], shorter and deeper than there
    are heads, or nothing; nodes.
    """
    batch, heads, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    likely = -np.sort(-rng.random((batch, heads, top_k), dtype=np.float32) / top_k, axis=2)
    likely[rng.random(likely.shape) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    likely = -np.sort(-likely, axis=2)
    vocab = draw(st.sampled_from([2 * top_k, 1000]))
    tokens = np.stack([rng.permutation(vocab)[:top_k] for _ in range(batch * heads)]).reshape(batch, heads, top_k)
    expected = Expected.nothing(batch, draw(st.integers(0, 9)))
    for row in expected.tokens:
        known = int(rng.integers(0, len(row) + 1))
        row[:known] = rng.integers(0, 2 * top_k, known)
    expected.odds[:] = np.where(expected.tokens >= 0, rng.random(expected.odds.shape), 0.0)
    return tokens, likely, expected, draw(st.sampled_from([1, 2, 7, 16, 63, 64, 65, 128]))


def grown(tokens, likely, expected, nodes):
    """The same on the device."""
    texts = TensorExpected(*map(torch.from_numpy, expected)) if expected.tokens.shape[1] else None
    return grow_trees(torch.from_numpy(tokens), torch.from_numpy(likely), nodes, texts)


@given(guesses())
def test_grown_as_on_the_cpu(guessed):
    """The same nodes in the same order; what the CPU leaves out is padding."""
    truth, trees = grow_mixture(*guessed), grown(*guessed)
    for row, size in enumerate(truth.sizes.tolist()):
        for name in ("tokens", "parents", "ranks"):
            assert getattr(trees, name)[row, :size].tolist() == getattr(truth, name)[row, :size].tolist(), name
        np.testing.assert_allclose(trees.reach[row, :size], truth.reach[row, :size], rtol=1e-5)
        assert (trees.parents[row, size:] == -1).all() and (trees.tokens[row, size:] == 0).all()
        assert (trees.reach[row, size:] == 0).all()


@given(guesses())
def test_depths_and_ancestors_as_on_the_cpu(guessed):
    """For whole trees and for each prefix of them."""
    parents = grown(*guessed).parents
    nodes = parents.shape[1]
    for width in {1, nodes // 2, nodes} - {0}:
        depths, ancestors = climb(parents[:, :width], max(guessed[0].shape[1], guessed[2].tokens.shape[1]))
        assert depths.tolist() == depths_of(parents[:, :width].numpy()).tolist()
        assert (ancestors.numpy().view(np.uint64) == ancestor_masks_of(parents[:, :width].numpy())).all()


def test_equal_probabilities_grow_a_tree():
    """Ties are broken in another order than on the CPU, but the reach is the same and parents come first."""
    likely = torch.full((1, 4, 4), 0.25)
    tokens = torch.arange(16).view(1, 4, 4)
    trees = grow_trees(tokens, likely, 40)
    truth = grow_mixture(tokens.numpy(), likely.numpy(), Expected.nothing(1), 40)
    tree = Tree(tuple(trees.parents[0].tolist()), tuple(trees.ranks[0].tolist()))
    assert sorted(tree.depths[1:]) == sorted(depths_of(truth.parents)[0, 1:].tolist())


def test_what_is_certain_comes_after_its_parent():
    """All products are 1, or were they not clamped, more; a NaN is no confidence."""
    tokens = torch.tensor([[[1, 2], [3, 4]]])
    likely = torch.tensor([[[1.0, 1.0 + 1e-6], [1.0 + 1e-6, torch.nan]]])
    certain = TensorExpected(torch.tensor([[1, 3, 7, 8]]), torch.ones(1, 4))
    for expected, paths in ((certain, {(1,), (1, 3), (1, 3, 7), (1, 3, 7, 8)}), (None, {(1,), (2,), (1, 3), (2, 3)})):
        trees = grow_trees(tokens, likely, 6, expected)
        size = int((trees.parents >= 0).sum())
        tree = Tree(tuple(trees.parents[0, :size].tolist()), tuple(trees.ranks[0, :size].tolist()))
        found = {tuple(int(trees.tokens[0, row - 1]) for row in tree.path(node)) for node in range(1, size + 1)}
        assert found == paths and trees.reach[0, :size].tolist() == [1.0] * size


def test_a_fixed_tree_takes_its_heads_candidates():
    tree = Tree((0, 0, 1, 3), (1, 0, 2, 0))
    tokens = torch.arange(2 * 3 * 4).view(2, 3, 4)
    likely = (tokens + 1) / 100
    trees = fill_tree(tree, tokens, likely, 6)
    assert trees.tokens.tolist() == [[1, 0, 6, 8, 0, 0], [13, 12, 18, 20, 0, 0]]
    assert trees.parents.tolist() == [[0, 0, 1, 3, -1, -1]] * 2
    reach = [0.02, 0.01, 0.02 * 0.07, 0.02 * 0.07 * 0.09, 0, 0]
    np.testing.assert_allclose(trees.reach[0], reach, rtol=1e-6)
