"""Trees grown on the device from two sources, as `mixture.py` grows them on the CPU; nothing waits for the host.

The full tree of both is the lookup's path and, below each row of it that a head sees beyond, the heads' own subtree.
Along a path each child's probability is a factor of at most one, so the likeliest nodes are a tree, and no heap is
needed: all places that could matter are weighed at once, and the best are taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.tree.growth import likely_paths
from vllm_medusa.tree.tensor_lookup import TensorExpected
from vllm_medusa.tree.tensors import TensorTrees


def grow_trees(
    tokens: Tensor, probabilities: Tensor, num_nodes: int, expected: TensorExpected | None = None
) -> TensorTrees:
    """For each request the `num_nodes` likeliest nodes over its heads' candidates and the lookup's path.

    The trees of `grow_mixture`, node for node, but where nodes are equally likely: there shallower ones come first, the
    lookup's before the heads'.

    Args:
        tokens: int64 [B, K, R], each head's candidates, best first.
        probabilities: float32 [B, K, R], calibrated, descending; NaN is no confidence.
        num_nodes: N.
        expected: the lookups' paths; None: the heads alone.

    One head says 4 or 5; the text expects 5, then 6, beyond what the head sees; there are three nodes in all:

    >>> heads = torch.tensor([[[4, 5]]]), torch.tensor([[[0.6, 0.3]]])
    >>> lookup = TensorExpected(torch.tensor([[5, 6]]), torch.tensor([[0.5, 0.8]]))
    >>> trees = grow_trees(*heads, 4, lookup)
    >>> trees.tokens.tolist(), trees.parents.tolist(), trees.ranks.tolist()
    ([[5, 6, 4, 0]], [[0, 1, 0, -1]], [[1, 2, 0, -1]])
    """
    batch, num_heads, top_k = tokens.shape
    device = tokens.device
    if expected is None:
        expected = TensorExpected(tokens[:, 0, :0], probabilities[:, 0, :0])
    most = expected.tokens.shape[1]
    field = _field(num_heads, top_k, most, num_nodes, device)
    known = probabilities.nan_to_num(nan=0.0).clamp(min=0.0, max=1.0)
    lines = _follow(tokens, known, expected)
    # The last factor stands for "no further". Products from the root on, as on the CPU: rounded alike.
    factors = torch.nn.functional.pad(torch.cat((known.flatten(1), lines.others.flatten(1)), 1), (0, 1), value=1.0)
    reach = lines.left[:, field.starts]
    for columns in field.columns:
        reach = reach * factors[:, columns]
    reach = torch.cat((lines.reach, reach, reach.new_zeros(batch, 1)), dim=1)
    # Floats that are not negative order like their bits; below them the place in the field, so that of equals the
    # shallower comes first: a parent always precedes its children, and the root everything.
    last = reach.shape[1] - 1
    keys = (reach.view(torch.int32).to(torch.int64) << 32) + torch.arange(last, -1, -1, device=device)
    best = keys.topk(min(num_nodes, last) + 1, dim=1).indices
    best = torch.nn.functional.pad(best, (0, num_nodes + 1 - best.shape[1]), value=last)
    row_of = torch.zeros_like(keys).scatter_(1, best, torch.arange(num_nodes + 1, device=device).expand_as(best))
    best = best[:, 1:]
    reach = reach.gather(1, best)
    is_node = reach > 0.0
    above, depths, ranks, meets = field.facts[:, best].unbind()
    # On the path a node is its twin, the head's candidate with the same token; a sibling passes over it.
    twin = torch.nn.functional.pad(lines.twins, (1, 0)).gather(1, depths)
    on_path = ranks < 0
    ranks = twin.where(on_path, ranks + meets * (ranks >= twin))
    place = (num_heads * top_k + depths - 1).where(on_path, (depths - 1) * top_k + ranks).where(is_node, 0)
    return TensorTrees(
        torch.cat((tokens.flatten(1), expected.tokens), dim=1).gather(1, place).where(is_node, 0),
        row_of.gather(1, above).where(is_node, -1),
        ranks.where(is_node, -1),
        reach,
    )


class _Lines(NamedTuple):
    """The lookups' paths through the heads' candidates. S of the rows 0 to L on a path have a head for what follows.

    Attributes:
        reach: float32 [B, L + 1], of each row on the path; 0 where there is none.
        left: float32 [B, S], what the path leaves of it to the heads.
        twins: int64 [B, max(K, L)], rank of the head's candidate that the path names too at depth 1, 2, ...; R: none.
        others: float32 [B, S, R], probabilities of the others, best first.
    """

    reach: Tensor
    left: Tensor
    twins: Tensor
    others: Tensor


def _follow(tokens: Tensor, known: Tensor, expected: TensorExpected) -> _Lines:
    """Arguments as of `grow_trees`; `known` are its probabilities, all of them numbers from 0 to 1."""
    _, num_heads, top_k = tokens.shape
    most = expected.tokens.shape[1]
    starts, pad = min(num_heads, most + 1), torch.nn.functional.pad
    path = pad(expected.tokens, (0, max(starts - most, 0)), value=-1)
    odds = pad(expected.odds, (0, max(starts - most, 0))).where(path >= 0, 0.0)
    there, found = (tokens[:, :starts] == path[:, :starts, None]).to(torch.uint8).max(dim=2)
    twins = found.where(there > 0, top_k)
    shares = pad(known[:, :starts], (0, 1))
    own = shares.gather(2, twins[:, :, None])[:, :, 0]
    order = torch.arange(top_k, device=tokens.device)
    others = shares.gather(2, order + (order >= twins[:, :, None]))
    above = torch.ones_like(own[:, 0])
    reach, left = [above], []
    for depth in range(starts):
        left.append(above * (1.0 - odds[:, depth]))
        below = torch.minimum(above * odds[:, depth] + left[-1] * own[:, depth], above)
        above = below.where(path[:, depth] >= 0, 0.0)
        reach.append(above)
    # A scan may round a product up: no row is likelier than the one above it.
    beyond = torch.cat((above[:, None], odds[:, starts:]), dim=1).cumprod(dim=1).cummin(dim=1).values
    return _Lines(
        torch.cat((torch.stack(reach, dim=1), beyond[:, 1:]), dim=1)[:, : most + 1],
        torch.stack(left, dim=1),
        pad(twins, (0, max(most, num_heads) - starts), value=top_k),
        others,
    )


class _Field(NamedTuple):
    """The M places that a best tree of N nodes can take up at all, parents before children; and one for padding.

    First come the root and the L nodes of the lookup's path, then the F nodes that only heads guess, by the row of the
    path below which they hang.

    Attributes:
        starts: int64 [F], that row.
        columns: K of int64 [F], by depth below it where the factor stands: among K * R probabilities, then S * R of
            the path's siblings, then 1.
        facts: int64 [4, M], each place's parent place, depth, rank (-1 on the path; among its siblings, without the
            path's node, where it has one), and 1 if it has one.
    """

    starts: Tensor
    columns: tuple[Tensor, ...]
    facts: Tensor


@lru_cache(maxsize=64)
def _field(num_heads: int, top_k: int, most: int, num_nodes: int, device: torch.device) -> _Field:
    """Below each row of the path what `likely_paths` finds there. 3,050 places for K=5, R=10, L=16, N=63."""
    facts = [(max(place - 1, 0), place, -1, 0) for place in range(most + 1)]
    starts: list[int] = []
    columns: list[list[int]] = []
    rows = min(num_heads, most + 1)
    end = (num_heads + rows) * top_k
    for start in range(rows):
        place_of: dict[tuple[int, ...], int] = {(): start}
        for path in likely_paths(num_heads - start, top_k, num_nodes)[1:]:
            place_of[path] = len(facts)
            facts.append((place_of[path[:-1]], start + len(path), path[-1], int(len(path) == 1)))
            starts.append(start)
            first, *further = path
            own = [(num_heads + start) * top_k + first]
            own += [(start + depth) * top_k + rank for depth, rank in enumerate(further, 1)]
            columns.append([*own, *[end] * (num_heads - len(own))])
    facts.append((0, 0, 0, 0))
    by_depth = torch.tensor(columns, device=device).T.contiguous().unbind()
    return _Field(torch.tensor(starts, device=device), by_depth, torch.tensor(facts, device=device).T.contiguous())
