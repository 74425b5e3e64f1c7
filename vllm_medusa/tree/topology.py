"""The shape of one draft: which node hangs below which, and everything that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_medusa.errors import MedusaError

MAX_NODES = 128
WORD_BITS = 64


@dataclass(frozen=True)
class Tree:
    """A tree of draft nodes below a root that is already emitted.

    `parents` is the truth, the rest is derived. Row 0 is the root and node i is row i + 1;
    `parents[i]` is the *row* of node i's parent. Invariants, checked on construction:

    - at most 128 nodes, and `0 <= parents[i] <= i`: parents come first, so any prefix of the list is a tree;
    - `ranks[i]` says which of its head's candidates node i is (0 = most likely); siblings differ in it.
      Left out, ranks count siblings in order.

    The draft "the | cat sat, dog, cat ran" after the root "the" has nodes cat, sat, dog, ran:

    >>> tree = Tree(parents=(0, 1, 0, 1))
    >>> tree.depths
    (0, 1, 2, 1, 2)
    >>> tree.ranks, tree.path(4), tree.prefix(2)
    ((0, 0, 1, 1), (1, 4), Tree(parents=(0, 1), ranks=(0, 0)))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parents = tuple(int(parent) for parent in self.parents)
        object.__setattr__(self, "parents", parents)
        if len(parents) > MAX_NODES:
            raise MedusaError.of("tree", f"{len(parents)} nodes", f"a tree has at most {MAX_NODES} nodes; drop some")
        for node, parent in enumerate(parents):
            if not 0 <= parent <= node:
                raise MedusaError.of(
                    f"parents[{node}]", parent, f"give the row of a parent that comes first, 0 (the root) to {node}"
                )
        ranks = tuple(int(rank) for rank in self.ranks) if self.ranks else _sibling_order(parents)
        object.__setattr__(self, "ranks", ranks)
        if len(ranks) != len(parents):
            raise MedusaError.of("ranks", ranks, f"give one rank per node, {len(parents)} in all")
        if min(ranks, default=0) < 0:
            raise MedusaError.of("ranks", min(ranks), "ranks count a head's candidates from 0")
        if len(set(zip(parents, ranks, strict=True))) != len(parents):
            raise MedusaError.of("ranks", ranks, "two siblings have the same rank; drop one of them")

    @classmethod
    def chain(cls, n: int) -> Tree:
        """`n` nodes in one line, each the top candidate of its head.

        >>> Tree.chain(3).parents
        (0, 1, 2)
        """
        return cls(parents=tuple(range(n)), ranks=(0,) * n)

    @property
    def num_nodes(self) -> int:
        """Draft nodes, the root not counted."""
        return len(self.parents)

    @property
    def num_rows(self) -> int:
        """Rows the target checks: the root and every node."""
        return len(self.parents) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each row; the root has 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """The most draft tokens one step can accept."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs below the one before it."""
        return self.parents == tuple(range(self.num_nodes))

    def children(self, row: int) -> tuple[int, ...]:
        """Rows of `row`'s children, in order."""
        return tuple(node + 1 for node, parent in enumerate(self.parents) if parent == row)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from depth 1 down to `row`; empty for the root."""
        rows: list[int] = []
        while row > 0:
            rows.append(row)
            row = self.parents[row - 1]
        return tuple(reversed(rows))

    def reach(self, rank_accuracy: Sequence[Sequence[float]]) -> list[float]:
        """How likely the walk gets to each node, if candidate r of head k is right with rank_accuracy[k][r].

        >>> Tree(parents=(0, 1, 0)).reach([[0.6, 0.2], [0.5, 0.1]])
        [0.6, 0.3, 0.2]
        """
        reach = [1.0]
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            reach.append(reach[parent] * rank_accuracy[self.depths[node + 1] - 1][rank])
        return reach[1:]

    def prefix(self, n: int) -> Tree:
        """The tree of the first `n` nodes (all of them if there are fewer)."""
        return Tree(parents=self.parents[:n], ranks=self.ranks[:n])

    def ancestor_masks(self) -> npt.NDArray[np.uint64]:
        """uint64 [rows, words]: bit i of a row = node i is the row itself or an ancestor of it.

        >>> Tree(parents=(0, 1, 0, 1)).ancestor_masks()[:, 0].tolist()  # root, cat, cat sat, dog, cat ran
        [0, 1, 3, 4, 9]
        """
        masks = ancestor_masks_of(np.asarray(self.parents, dtype=np.int64).reshape(1, -1))
        return masks.reshape(self.num_rows, -1)


def depths_of(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Depths of a batch of trees of the same width.

    Args:
        parents: int64 [B, N], rows of parents; -1 marks padding nodes.

    Returns:
        int64 [B, N + 1], per row; the root and padding nodes have 0.

    >>> depths_of(np.array([[0, 1, 0, 1], [0, 1, 2, -1]])).tolist()
    [[0, 1, 2, 1, 2], [0, 1, 2, 3, 0]]
    """
    parent_of, ancestor = _climbers(parents)
    depths = np.zeros_like(ancestor)
    while ancestor.any():
        depths += ancestor > 0
        ancestor = np.take_along_axis(parent_of, ancestor, axis=1)
    return depths


def ancestor_masks_of(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Ancestor bits of a batch of trees of the same width.

    Args:
        parents: int64 [B, N], rows of parents; -1 marks padding nodes.

    Returns:
        uint64 [B, N + 1, W], W = ceil(N / 64) words and at least one: bit i % 64 of word i // 64 = node i is the
        row itself or an ancestor. The root and padding nodes have no bits.

    >>> ancestor_masks_of(np.array([[0, 1, 0, 1]]))[0, :, 0].tolist()
    [0, 1, 3, 4, 9]
    """
    batch, width = parents.shape
    parent_of, ancestor = _climbers(parents)
    words = np.arange(num_words(width), dtype=np.int64)
    masks = np.zeros((batch, width + 1, len(words)), dtype=np.uint64)
    while ancestor.any():
        node = ancestor[:, :, None] - 1  # -1 on rows that have reached the root: no word takes it
        bit = np.left_shift(np.uint64(1), (node % WORD_BITS).astype(np.uint64))
        masks |= np.where(node // WORD_BITS == words, bit, np.uint64(0))
        ancestor = np.take_along_axis(parent_of, ancestor, axis=1)
    return masks


def num_words(num_nodes: int) -> int:
    """uint64 words a row's ancestor bits take: one up to 64 nodes, two up to 128.

    >>> num_words(0), num_words(64), num_words(65)
    (1, 1, 2)
    """
    return max(1, -(-num_nodes // WORD_BITS))


def _climbers(parents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(row -> parent row, each row itself), both int64 [B, N + 1]; a padding node starts on the root."""
    batch, width = parents.shape
    parent_of = np.zeros((batch, width + 1), dtype=np.int64)
    np.maximum(parents, 0, out=parent_of[:, 1:])
    rows = np.broadcast_to(np.arange(width + 1, dtype=np.int64), parent_of.shape).copy()
    rows[:, 1:][parents < 0] = 0
    return parent_of, rows


def _sibling_order(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Rank of each node if ranks count siblings in order."""
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return tuple(ranks)


def keep_nodes(parents: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Parents of a tree cut down to an ancestor-closed part of its nodes.

    Args:
        parents: int64 [N], row of each node's parent.
        kept: int64 [n], nodes to keep, ascending; every kept node's parent is the root or kept.

    Returns:
        int64 [n], row of each kept node's parent among the kept.

    >>> keep_nodes(np.array([0, 0, 2, 1, 3]), np.array([1, 2, 4])).tolist()
    [0, 1, 2]
    """
    rows = np.full(len(parents) + 1, -1, dtype=np.int64)
    rows[0] = 0
    rows[kept + 1] = np.arange(1, len(kept) + 1)
    return rows[parents[kept]]
