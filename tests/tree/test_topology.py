"""The Tree value and its batched forms, against naive walks up the parent links."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.topology import Tree, ancestor_masks_of, depths_of, num_words


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 128) -> tuple[int, ...]:
    n = draw(st.integers(0, max_nodes))
    return tuple(draw(st.integers(0, i)) for i in range(n))


def naive_ancestors(parents: tuple[int, ...], row: int) -> set[int]:
    """Nodes on the way from `row` to the root, the row's own included."""
    return set() if row == 0 else {row - 1} | naive_ancestors(parents, parents[row - 1])


def bits(words: np.ndarray) -> set[int]:
    return {64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if word >> b & 1}


@given(parent_lists())
def test_everything_follows_from_parents(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    masks = tree.ancestor_masks()
    assert masks.shape == (len(parents) + 1, num_words(len(parents))) and masks.dtype == np.uint64
    for row in range(tree.num_rows):
        ancestors = naive_ancestors(parents, row)
        assert bits(masks[row]) == ancestors
        assert tree.depths[row] == len(ancestors)
        assert tree.path(row) == tuple(sorted(node + 1 for node in ancestors))
        assert tree.children(row) == tuple(i + 1 for i, p in enumerate(parents) if p == row)
    assert tree.max_depth == max(tree.depths)
    assert depths_of(np.array([parents], dtype=np.int64).reshape(1, -1)).tolist() == [list(tree.depths)]


@given(parent_lists(), st.integers(0, 128))
def test_any_prefix_is_a_tree(parents: tuple[int, ...], n: int) -> None:
    tree = Tree(parents)
    cut = tree.prefix(n)
    assert cut.parents == parents[:n] and cut.ranks == tree.ranks[:n]
    words = num_words(cut.num_nodes)
    assert np.array_equal(cut.ancestor_masks(), tree.ancestor_masks()[: cut.num_rows, :words])


@given(st.lists(parent_lists(max_nodes=70), min_size=1, max_size=4))
def test_batches_equal_single_trees(batch: list[tuple[int, ...]]) -> None:
    width = max(len(parents) for parents in batch)
    padded = np.array([parents + (-1,) * (width - len(parents)) for parents in batch], dtype=np.int64)
    padded = padded.reshape(len(batch), width)
    masks, depths = ancestor_masks_of(padded), depths_of(padded)
    for row, parents in enumerate(batch):
        tree = Tree(parents)
        words = num_words(tree.num_nodes)
        assert np.array_equal(masks[row, : tree.num_rows, :words], tree.ancestor_masks())
        assert not masks[row, tree.num_rows :].any() and not masks[row, :, words:].any()
        assert depths[row].tolist() == list(tree.depths) + [0] * (width - tree.num_nodes)


def test_chain() -> None:
    chain = Tree.chain(128)
    assert chain.is_chain and chain.max_depth == 128 and chain.ranks == (0,) * 128
    assert not Tree((0, 0)).is_chain
    assert Tree.chain(0).num_rows == 1 and Tree(()).max_depth == 0


def test_ranks_left_out_count_siblings() -> None:
    assert Tree((0, 0, 1, 0, 1)).ranks == (0, 1, 0, 2, 1)


@pytest.mark.parametrize(
    ("parents", "ranks", "key"),
    [
        ((1,), (), r"parents\[0\]=1"),
        ((0, -1), (), r"parents\[1\]=-1"),
        ((0, 0, 4), (), r"parents\[2\]=4"),
        (tuple(range(129)), (), "129 nodes"),
        ((0, 0), (1, 1), "same rank"),
        ((0, 0), (1,), "one rank per node, 2"),
        ((0, 0), (0, -1), "count a head's candidates from 0"),
    ],
)
def test_bad_trees_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...], key: str) -> None:
    with pytest.raises(MedusaError, match=key):
        Tree(parents, ranks)
