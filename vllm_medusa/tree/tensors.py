"""Trees as tensors on the device that drafts them: batched, and nothing waits for the host."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.tree.growth import grow_dynamic
from vllm_medusa.tree.topology import WORD_BITS, Tree, num_words


class TensorTrees(NamedTuple):
    """One tree of N nodes for each of B requests; a smaller one is filled up with padding nodes, which never match.

    Attributes:
        tokens: int64 [B, N], token of each node; 0 for padding, so that it can be embedded.
        parents: int64 [B, N], row of each node's parent (0 = root); -1 for padding.
        ranks: int64 [B, N], which of its head's candidates a node is; -1 for padding.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor


def grow_trees(tokens: Tensor, probabilities: Tensor, num_nodes: int) -> TensorTrees:
    """For each request the `num_nodes` likeliest nodes of the full tree over its heads' candidates.

    Args:
        tokens: int64 [B, K, R], each head's candidates, best first.
        probabilities: float32 [B, K, R], calibrated, descending; NaN is no confidence.
        num_nodes: N.

    Two heads; there are four nodes of any probability:

    >>> tokens, likely = torch.tensor([[[4, 5], [6, 7]]]), torch.tensor([[[0.6, 0.2], [0.5, 0.0]]])
    >>> trees = grow_trees(tokens, likely, 5)
    >>> trees.tokens.tolist(), trees.parents.tolist()
    ([[4, 6, 5, 6, 0]], [[0, 1, 0, 3, -1]])
    """
    grown = grow_dynamic(probabilities, num_nodes)
    is_node = grown.reach > 0.0
    top_k = tokens.shape[2]
    place = (grown.depths - 1).clamp(min=0) * top_k + grown.ranks
    return TensorTrees(
        tokens.flatten(1).gather(1, place).where(is_node, 0),
        grown.parents.where(is_node, -1),
        grown.ranks.where(is_node, -1),
    )


def fill_tree(tree: Tree, tokens: Tensor, num_nodes: int) -> TensorTrees:
    """The same tree for every request, with its heads' candidates.

    Args:
        tree: a fixed tree of at most N nodes.
        tokens: int64 [B, K, R], each head's candidates, best first.
        num_nodes: N.

    >>> fill_tree(Tree((0, 1, 0)), torch.tensor([[[4, 5], [6, 7]]]), 4).tokens.tolist()
    [[4, 6, 5, 0]]
    """
    places, parents, ranks = _table(tree, tokens.shape[2], num_nodes, tokens.device)
    batch = tokens.shape[0]
    found = tokens.flatten(1).index_select(1, places)
    return TensorTrees(found.where(parents >= 0, 0), parents.expand(batch, -1), ranks.expand(batch, -1))


@lru_cache(maxsize=16)
def _table(tree: Tree, top_k: int, num_nodes: int, device: torch.device) -> Tensor:
    """int64 [3, N]: each node's place among K * R candidates, its parent and its rank. Copied to the device once."""
    padding = num_nodes - tree.num_nodes
    places = [(depth - 1) * top_k + rank for depth, rank in zip(tree.depths[1:], tree.ranks, strict=True)]
    rows = [places, list(tree.parents), list(tree.ranks)]
    filled = [[*row, *[fill] * padding] for row, fill in zip(rows, (0, -1, -1), strict=True)]
    return torch.tensor(filled, device=device)


def climb(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Depths and ancestor bits of a batch of trees: `topology.depths_of` and `ancestor_masks_of` without a host.

    Args:
        parents: int64 [B, N], rows of parents; -1 for padding.
        max_depth: no node is deeper.

    Returns:
        int64 [B, N + 1], depth of each row, and int64 [B, N + 1, W], the uint64 words of its ancestor bits; the root
        and padding have neither depth nor bits.

    >>> depths, ancestors = climb(torch.tensor([[0, 1, 0, 1]]), 2)
    >>> depths.tolist(), ancestors[0, :, 0].tolist()
    ([[0, 1, 2, 1, 2]], [0, 1, 3, 4, 9])
    """
    batch, width = parents.shape
    device = parents.device
    above = torch.nn.functional.pad(parents.clamp(min=0), (1, 0))  # row -> parent's row, [B, N + 1]
    exists = torch.nn.functional.pad(parents >= 0, (1, 0))
    row = torch.arange(width + 1, device=device).expand(batch, -1).where(exists, 0)
    words = torch.arange(num_words(width), device=device)
    one = torch.ones((), dtype=torch.int64, device=device)
    depths = torch.zeros_like(above)
    ancestors = torch.zeros(batch, width + 1, len(words), dtype=torch.int64, device=device)
    for _ in range(max_depth):
        node = row[:, :, None] - 1  # -1 on rows that have reached the root: no word takes it
        bit = torch.bitwise_left_shift(one, node.clamp(min=0) % WORD_BITS)
        here = torch.div(node, WORD_BITS, rounding_mode="floor") == words
        ancestors = ancestors | bit.where(here, 0)
        depths = depths + (row > 0)
        row = above.gather(1, row)
    return depths, ancestors
