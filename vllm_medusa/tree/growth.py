"""Which nodes are worth drafting: a fixed tree from measured accuracy, or one per request and step from confidence."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.topology import MAX_NODES, Tree


class GrownTrees(NamedTuple):
    """One tree per request, nodes in the order in which they are likely to be reached.

    Attributes:
        parents: int64 [B, N], the row of each node's parent (0 = root); -1 where a request has no such node.
        ranks: int64 [B, N], which of its head's candidates a node is.
        depths: int64 [B, N], 1 for children of the root, 0 for padding. Node i takes the token of head depth - 1.
        reach: float32 [B, N], the probability that the walk gets to the node; never grows along a row of it.
    """

    parents: Tensor
    ranks: Tensor
    depths: Tensor
    reach: Tensor


def grow_static(rank_accuracy: Sequence[Sequence[float]], num_nodes: int) -> Tree:
    """The tree of at most `num_nodes` nodes that is expected to accept most, given accuracies alone.

    A node is reached if every guess on its path is right; guesses of different heads are taken as independent, so
    its probability is the product of their accuracies, and the best tree is the `num_nodes` likeliest nodes
    (Medusa, arXiv:2401.10774, section 3.3, without its loop over whole trees). Nodes come in order of that
    probability, so the first n of them are the best tree of n. Nodes that are never right are left out.

    Args:
        rank_accuracy: [K][R], how often candidate r of head k is the right token.
        num_nodes: 1 to 128.

    >>> grow_static([[0.6, 0.2], [0.5, 0.1]], 4)  # reach .6, .3, .2, .1
    Tree(parents=(0, 1, 0, 3), ranks=(0, 0, 1, 0))
    """
    table = [[float(accuracy) for accuracy in head] for head in rank_accuracy]
    if not all(0.0 <= accuracy <= 1.0 for head in table for accuracy in head):  # also refuses NaN
        raise MedusaError.of("rank_accuracy", table, "accuracies are between 0 and 1; calibrate the heads again")
    if not 1 <= num_nodes <= MAX_NODES:
        raise MedusaError.of("num_speculative_tokens", num_nodes, f"choose 1 to {MAX_NODES}")
    if not any(table[0] if table else ()):
        raise MedusaError.of("rank_accuracy", table, "the first head is never right; train or calibrate the heads")
    parents: list[int] = []
    ranks: list[int] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # (-reach, order of discovery, parent row, rank, depth)
    discovered = 0

    def discover(reach: float, row: int, depth: int) -> None:
        nonlocal discovered
        for rank, accuracy in enumerate(table[depth] if depth < len(table) else ()):
            if accuracy > 0.0:
                heapq.heappush(waiting, (-reach * accuracy, discovered, row, rank, depth + 1))
                discovered += 1

    discover(1.0, 0, 0)
    while waiting and len(parents) < num_nodes:
        negative_reach, _, parent, rank, depth = heapq.heappop(waiting)
        parents.append(parent)
        ranks.append(rank)
        discover(-negative_reach, len(parents), depth)
    return Tree(tuple(parents), tuple(ranks))


def grow_dynamic(probabilities: Tensor, num_nodes: int) -> GrownTrees:
    """For each request the `num_nodes` likeliest nodes of the full tree over its heads' candidates.

    The probability of a node is the product of its path's candidates (confidence in place of measured accuracy: the
    idea of EAGLE-2, arXiv:2406.16858, where one product covers all depths because Medusa heads are independent given
    the root). It never grows along a path, so the likeliest nodes always form a tree.

    Args:
        probabilities: float32 [B, K, R], calibrated probabilities of each head's R best candidates, descending.
        num_nodes: N, nodes per request; fewer may exist, then the rest is padding.

    Head 0 guesses cat .6, dog .2; head 1 guesses sat .5, ran .1, whatever came before:

    >>> grown = grow_dynamic(torch.tensor([[[0.6, 0.2], [0.5, 0.1]]]), 4)
    >>> grown.parents.tolist(), grown.ranks.tolist(), grown.depths.tolist()  # cat, cat sat, dog, dog sat
    ([[0, 1, 0, 3]], [[0, 0, 1, 0]], [[1, 2, 1, 2]])
    """
    batch, num_heads, top_k = probabilities.shape
    device = probabilities.device
    field = _field(num_heads, top_k, num_nodes, device)
    # A NaN is no confidence: it must not sort a child before its parent. The last column stands for "no further".
    known = torch.nn.functional.pad(probabilities.nan_to_num(nan=0.0).flatten(1), (0, 1), value=1.0)
    factors = known.index_select(1, field.columns).view(batch, num_heads, -1)
    reach = factors[:, 0]
    for head in range(1, num_heads):
        reach = reach * factors[:, head]
    # Floats that are not negative order like their bits; below them the place in the field, so that of equals the
    # shallower comes first: a parent always precedes its children, and the root everything.
    keys = (reach.view(torch.int32).to(torch.int64) << 32) + field.earlier
    best = keys.topk(min(num_nodes + 1, keys.shape[1]), dim=1).indices
    row_of = torch.empty_like(keys).scatter_(1, best, torch.arange(best.shape[1], device=device).expand_as(best))
    best = best[:, 1:]
    above, ranks, depths = field.facts[:, best].unbind()
    grown = GrownTrees(row_of.gather(1, above), ranks, depths, reach.gather(1, best))
    missing = num_nodes - best.shape[1]
    if missing <= 0:
        return grown
    pad = torch.nn.functional.pad
    return GrownTrees(*(pad(x, (0, missing), value=fill) for x, fill in zip(grown, (-1, 0, 0, 0.0), strict=True)))


class _Field(NamedTuple):
    """The M places (place 0 is the root) that a best tree of N nodes can take up at all, shallow ones first.

    Attributes:
        columns: int64 [K * M], where each place's factors stand among K * R probabilities (K * R: none so deep).
        earlier: int64 [M], larger for places that come earlier.
        facts: int64 [3, M], each place's parent place, rank and depth.
    """

    columns: Tensor
    earlier: Tensor
    facts: Tensor


@lru_cache(maxsize=64)
def _field(num_heads: int, top_k: int, num_nodes: int, device: torch.device) -> _Field:
    """The places of `likely_paths`."""
    paths = likely_paths(num_heads, top_k, num_nodes)
    place_of = {path: place for place, path in enumerate(paths)}
    beyond = num_heads * top_k
    columns = [
        [path[head] + head * top_k if head < len(path) else beyond for path in paths] for head in range(num_heads)
    ]
    facts = [
        [place_of[path[:-1]] for path in paths],
        [path[-1] if path else 0 for path in paths],
        [len(path) for path in paths],
    ]
    return _Field(
        torch.tensor(columns, device=device).flatten(),
        torch.arange(len(paths) - 1, -1, -1, device=device),
        torch.tensor(facts, device=device),
    )


def likely_paths(num_heads: int, top_k: int, num_nodes: int) -> list[tuple[int, ...]]:
    """Paths, as ranks by depth, that fewer than `num_nodes` others are sure to beat: shallow ones first, () the root.

    The path with ranks (r1, ..., rd) is never likelier than those at or above it with ranks (s1, ..., se), e <= d and
    every s <= r. There are (r1+1) + (r1+1)(r2+1) + ... of these, itself included; all come earlier in the list, so a
    path with more than N of them is never needed. 130 paths remain of 11110 for K=4, R=10, N=16.

    >>> likely_paths(2, 2, 2)
    [(), (0,), (1,), (0, 0)]
    """
    paths: list[tuple[int, ...]] = [()]
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]  # path, paths of its depth that beat it, of any depth
    for _ in range(num_heads):
        below = []
        for path, here, in_all in level:
            for rank in range(top_k):
                if in_all + here * (rank + 1) > num_nodes:
                    break
                below.append(((*path, rank), here * (rank + 1), in_all + here * (rank + 1)))
        paths += [path for path, _, _ in below]
        level = below
    return paths
