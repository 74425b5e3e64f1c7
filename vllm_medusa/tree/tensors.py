"""Trees as tensors on the device that drafts them: batched, and nothing waits for the host."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.tree.topology import WORD_BITS, Tree, num_words


class TensorTrees(NamedTuple):
    """One tree of N nodes for each of B requests; a smaller one is filled up with padding nodes, which never match.

    Attributes:
        tokens: int64 [B, N], token of each node; 0 for padding, so that it can be embedded.
        parents: int64 [B, N], row of each node's parent (0 = root); -1 for padding.
        ranks: int64 [B, N], which of its head's R candidates a node is; R: none of them, the text expects it; -1 for
            padding.
        reach: float32 [B, N], the probability that the walk gets to the node; 0 for padding.
    """

    tokens: Tensor
    parents: Tensor
    ranks: Tensor
    reach: Tensor


def fill_tree(tree: Tree, tokens: Tensor, probabilities: Tensor, num_nodes: int) -> TensorTrees:
    """The same tree for every request, with its heads' candidates.

    Args:
        tree: a fixed tree of at most N nodes.
        tokens: int64 [B, K, R], each head's candidates, best first.
        probabilities: float32 [B, K, R], of these.
        num_nodes: N.

    >>> tokens, likely = torch.tensor([[[4, 5], [6, 7]]]), torch.tensor([[[0.5, 0.25], [0.5, 0.0]]])
    >>> filled = fill_tree(Tree((0, 1, 0)), tokens, likely, 4)
    >>> filled.tokens.tolist(), filled.reach.tolist()
    ([[4, 6, 5, 0]], [[0.5, 0.25, 0.25, 0.0]])
    """
    batch, top_k = tokens.shape[0], tokens.shape[2]
    table, paths = _table(tree, top_k, tokens.shape[1], num_nodes, tokens.device)
    places, parents, ranks = table
    factors = torch.nn.functional.pad(probabilities.flatten(1), (0, 1), value=1.0)
    reach = factors.new_ones(batch, num_nodes)
    for columns in paths:
        reach = reach * factors[:, columns]
    return TensorTrees(
        tokens.flatten(1).index_select(1, places).where(parents >= 0, 0),
        parents.expand(batch, -1),
        ranks.expand(batch, -1),
        reach.where(parents >= 0, 0.0),
    )


@lru_cache(maxsize=16)
def _table(tree: Tree, top_k: int, num_heads: int, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copied to the device once.

    Returns:
        int64 [3, N]: each node's place among K * R candidates, its parent and its rank; and int64 [D, N]: the places on
        its path, by depth, K * R where it is shallower.
    """

    def place(row: int) -> int:
        return (tree.depths[row] - 1) * top_k + tree.ranks[row - 1]

    def padded(values: list[int], fill: int) -> list[int]:
        return [*values, *[fill] * (num_nodes - len(values))]

    nodes = range(1, tree.num_rows)
    end = num_heads * top_k
    paths = [[place(row) for row in tree.path(node)] for node in nodes]
    by_depth = [padded([p[d] if d < len(p) else end for p in paths], end) for d in range(tree.max_depth)]
    table = [padded([place(node) for node in nodes], 0), padded([*tree.parents], -1), padded([*tree.ranks], -1)]
    return torch.tensor(table, device=device), torch.tensor(by_depth, device=device)


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
    exists = torch.nn.functional.pad(parents >= 0, (1, 0))
    node = torch.arange(-1, width, device=device)[:, None]
    words = torch.arange(num_words(width), device=device)
    bit = torch.bitwise_left_shift(torch.ones_like(node), node.clamp(min=0) % WORD_BITS)
    own = bit.where(torch.div(node, WORD_BITS, rounding_mode="floor") == words, 0)
    ancestors = own.expand(batch, -1, -1).where(exists[:, :, None], 0)
    depths = exists.to(torch.int64)
    above = torch.nn.functional.pad(parents.clamp(min=0), (1, 0))  # [B, N + 1], the row that is 1, 2, 4, ... levels up
    for _ in range((max_depth - 1).bit_length()):
        depths = depths + depths.gather(1, above)
        ancestors = ancestors | ancestors.gather(1, above[:, :, None].expand_as(ancestors))
        above = above.gather(1, above)
    return depths, ancestors
