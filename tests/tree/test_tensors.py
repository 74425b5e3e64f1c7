"""Trees made on the device are those that the CPU makes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.lookup import Expected
from vllm_medusa.tree.mixture import grow_mixture
from vllm_medusa.tree.tensors import climb, fill_tree, grow_trees
from vllm_medusa.tree.topology import Tree, ancestor_masks_of, depths_of


@st.composite
def guesses(draw):
    """Candidates of a few requests: tokens [B, K, R], probabilities [B, K, R] descending, some of them 0."""
    batch, heads, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    likely = -np.sort(-rng.random((batch, heads, top_k), dtype=np.float32) / top_k, axis=2)
    likely[rng.random(likely.shape) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    likely = -np.sort(-likely, axis=2)
    tokens = np.stack([rng.permutation(1000)[:top_k] for _ in range(batch * heads)]).reshape(batch, heads, top_k)
    return tokens, likely, draw(st.sampled_from([1, 2, 7, 16, 63, 64, 65, 128]))


@given(guesses())
def test_grown_as_on_the_cpu(guessed):
    """The same nodes in the same order; what the CPU leaves out is padding."""
    tokens, likely, nodes = guessed
    truth = grow_mixture(tokens, likely, Expected.nothing(len(tokens)), nodes)
    trees = grow_trees(torch.from_numpy(tokens), torch.from_numpy(likely), nodes)
    for row, size in enumerate(truth.sizes.tolist()):
        for name in ("tokens", "parents", "ranks"):
            assert getattr(trees, name)[row, :size].tolist() == getattr(truth, name)[row, :size].tolist(), name
        assert (trees.parents[row, size:] == -1).all() and (trees.tokens[row, size:] == 0).all()


@given(guesses())
def test_depths_and_ancestors_as_on_the_cpu(guessed):
    """For whole trees and for each prefix of them."""
    tokens, likely, nodes = guessed
    parents = grow_trees(torch.from_numpy(tokens), torch.from_numpy(likely), nodes).parents
    for width in {1, nodes // 2, nodes} - {0}:
        depths, ancestors = climb(parents[:, :width], tokens.shape[1])
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


def test_a_fixed_tree_takes_its_heads_candidates():
    tree = Tree((0, 0, 1, 3), (1, 0, 2, 0))
    tokens = torch.arange(2 * 3 * 4).view(2, 3, 4)
    trees = fill_tree(tree, tokens, 6)
    assert trees.tokens.tolist() == [[1, 0, 6, 8, 0, 0], [13, 12, 18, 20, 0, 0]]
    assert trees.parents.tolist() == [[0, 0, 1, 3, -1, -1]] * 2
