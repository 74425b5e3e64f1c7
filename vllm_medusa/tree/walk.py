"""Which drafted path the target agrees with, and what a step therefore emits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Walk(NamedTuple):
    """The outcome of one step. D is the longest accepted path in the batch.

    Attributes:
        rows: int64 [B, D + 1], the accepted path: row 0 first, then one row per depth, padded with -1.
        tokens: int64 [B, D + 1], what is emitted: the accepted drafts, then the bonus token, padded with -1.
        lengths: int64 [B], emitted tokens (accepted + 1).
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor


def greedy_walk(
    target_tokens: Tensor,
    node_tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    max_depth: int | None = None,
) -> Walk:
    """Follow, from each root, the children that carry the target's own choice.

    Args:
        target_tokens: int64 [B, N + 1], the target's token after each row.
        node_tokens: int64 [B, N], drafted tokens.
        parents: int64 [B, N], rows of the nodes' parents.
        num_nodes: int64 [B], nodes of each request; later ones are padding.
        max_depth: depth of the deepest tree, if known: then nothing waits for the device. Else the walk stops when
            no request moves.

    Draft cat(sat, ran), dog after "the"; the target says "the cat ran away":

    >>> cat, sat, dog, ran, away = 10, 11, 12, 13, 14
    >>> walk = greedy_walk(
    ...     target_tokens=torch.tensor([[cat, ran, 0, 0, away]]),
    ...     node_tokens=torch.tensor([[cat, sat, dog, ran]]),
    ...     parents=torch.tensor([[0, 1, 0, 1]]),
    ...     num_nodes=torch.tensor([4]),
    ... )
    >>> walk.rows.tolist(), walk.tokens.tolist(), walk.lengths.tolist()
    ([[0, 1, 4]], [[10, 13, 14]], [3])
    """
    # Where the walk goes from each row, looked up for all rows at once; one column more for walks that have ended.
    nowhere = node_tokens.shape[1] + 1
    node = torch.arange(1, nowhere, device=parents.device)
    above = parents.clamp(min=0)
    agrees = (node_tokens == target_tokens.gather(1, above)) & (node <= num_nodes[:, None]) & (parents >= 0)
    child = torch.full_like(target_tokens[:, :1], nowhere).repeat(1, nowhere + 1)
    child.scatter_reduce_(1, above.where(agrees, nowhere), node.where(agrees, nowhere), "amin")
    standing = torch.zeros_like(num_nodes)[:, None]
    path = [standing]
    while max_depth is None or len(path) <= max_depth:
        standing = child.gather(1, standing)
        if max_depth is None and not bool((standing < nowhere).any()):
            break
        path.append(standing)
    rows = torch.cat(path, dim=1)
    on_path = rows < nowhere
    rows = rows.where(on_path, -1)
    tokens = target_tokens.gather(1, rows.clamp(min=0)).where(on_path, -1)
    return Walk(rows, tokens, on_path.sum(dim=1))


def step_to_child(rows: Tensor, sampled: Tensor, node_tokens: Tensor, parents: Tensor, num_nodes: Tensor) -> Tensor:
    """One round of a walk: from each request's row to its child that carries the sampled token.

    Args:
        rows: int64 [B], where each request stands; -1 if its walk has ended.
        sampled: int64 [B], the token drawn from the target at that row.
        node_tokens, parents: int64 [B, N]; num_nodes: int64 [B].

    Returns:
        int64 [B], the child's row, -1 if there is none. If two siblings carry the token, the first.

    >>> tree = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[0, 1, 0, 1]]), torch.tensor([4])
    >>> step_to_child(torch.tensor([1]), torch.tensor([13]), *tree).tolist()
    [4]
    >>> step_to_child(torch.tensor([1]), torch.tensor([12]), *tree).tolist()
    [-1]
    """
    if node_tokens.shape[1] == 0:
        return torch.full_like(rows, -1)
    is_node = torch.arange(node_tokens.shape[1], device=rows.device) < num_nodes[:, None]
    hit = (parents == rows[:, None]) & (node_tokens == sampled[:, None]) & is_node
    found, node = hit.to(torch.uint8).max(dim=1)  # max returns the first of equals
    return (node + 1).where((found > 0) & (rows >= 0), -1)
