"""Trees grown from two sources: the heads' candidates, and what the request's own text expects next.

At a node on the lookup's path the next token is the lookup's with probability a, else the heads are asked:

    q(t) = a [t = lookup] + (1 - a) p(t)          elsewhere q = p

so a token that both name gains, and the heads' other tokens lose. Growth is best-first, as in growth.py, where one
table of products no longer does: the lookup's path has probabilities of its own and may be deeper than there are heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_medusa.tree import native
from vllm_medusa.tree.lookup import Expected

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NOWHERE = -1


class MixedTrees(NamedTuple):
    """One tree per request, nodes in the order in which they are likely to be reached.

    Attributes:
        tokens: int64 [B, N], -1 beyond `sizes`, as are the parents.
        parents: int64 [B, N], the row of each node's parent (0 = root).
        ranks: int64 [B, N], which of its head's R candidates a node is; R: the lookup's, and no candidate.
        reach: float32 [B, N], the probability that the walk gets to the node; never grows along a row of it.
        sizes: int64 [B], nodes of each request.
    """

    tokens: Ints
    parents: Ints
    ranks: Ints
    reach: Floats
    sizes: Ints


def grow_mixture(tokens: Ints, probabilities: Floats, expected: Expected, num_nodes: int) -> MixedTrees:
    """For each request the `num_nodes` likeliest nodes over the heads' candidates and the lookup's path.

    Args:
        tokens: int64 [B, K, R], each head's candidates, best first.
        probabilities: float32 [B, K, R], calibrated, descending; NaN is no confidence.
        expected: the lookup's paths.
        num_nodes: N, most nodes per request.

    One head says 4 or 5; the text expects 5, then 6, beyond what the head sees:

    >>> heads = np.array([[[4, 5]]]), np.array([[[0.6, 0.3]]], dtype=np.float32)
    >>> lookup = Expected(np.array([[5, 6]]), np.array([[0.5, 0.8]], dtype=np.float32))
    >>> grown = grow_mixture(*heads, lookup, 3)
    >>> grown.tokens.tolist(), grown.parents.tolist(), grown.ranks.tolist(), grown.reach.round(2)
    ([[5, 6, 4]], [[0, 1, 0]], [[1, 2, 0]], array([[0.65, 0.52, 0.3 ]], dtype=float32))
    """
    batch, num_heads, top_k = tokens.shape
    grown = MixedTrees(
        np.full((batch, num_nodes), -1, dtype=np.int64),
        np.full((batch, num_nodes), -1, dtype=np.int64),
        np.zeros((batch, num_nodes), dtype=np.int64),
        np.zeros((batch, num_nodes), dtype=np.float32),
        np.zeros(batch, dtype=np.int64),
    )
    library = native.load()
    if library is None:
        for row in range(batch):
            grown.sizes[row] = _grow(
                tokens[row],
                probabilities[row],
                expected.tokens[row],
                expected.odds[row],
                grown.tokens[row],
                grown.parents[row],
                grown.ranks[row],
                grown.reach[row],
            )
        return grown
    given = (
        np.ascontiguousarray(tokens, dtype=np.int64),
        np.ascontiguousarray(probabilities, dtype=np.float32),
        np.ascontiguousarray(expected.tokens, dtype=np.int64),
        np.ascontiguousarray(expected.odds, dtype=np.float32),
    )
    library.medusa_grow(
        *(part.ctypes.data for part in given),
        *(batch, num_heads, top_k, expected.tokens.shape[1], num_nodes),
        *(part.ctypes.data for part in grown),
    )
    return grown


def _grow(
    tokens: Ints,
    probabilities: Floats,
    expected: Ints,
    odds: Floats,
    out_tokens: Ints,
    parents: Ints,
    ranks: Ints,
    reach: Floats,
) -> int:
    """Grow one tree into the last four arrays; the number of its nodes.

    Of every node in the tree two may be waiting: its best child among the heads' that is not in the tree yet, and its
    child on the lookup's path. They are few, so a scan for the best is quicker than a heap.
    """
    num_heads, top_k = tokens.shape
    known = np.where(probabilities > 0.0, probabilities, np.float32(0.0))  # a NaN is no confidence
    waiting: list[_Waiting] = []
    row, depth, above, on_path = 0, 0, np.float32(1.0), True  # whose children come next: the root's
    size = 0
    while True:
        twin, left = NOWHERE, above  # the head's candidate that the lookup names too
        if on_path and depth < len(expected) and expected[depth] >= 0:
            left = above * (np.float32(1.0) - odds[depth])
            value = above * odds[depth]
            twin = top_k
            hits = np.flatnonzero(tokens[depth : depth + 1] == expected[depth])  # none beyond the last head
            if len(hits):
                twin = int(hits[0])
                value += left * known[depth, twin]
            waiting.append(_Waiting(min(value, above), left, row, depth, twin, twin))
        first = 1 if twin == 0 else 0
        if depth < num_heads and first < top_k:
            waiting.append(_Waiting(left * known[depth, first], left, row, depth, first, twin))

        best = max(range(len(waiting)), key=lambda place: waiting[place].worth, default=NOWHERE)
        if size == len(out_tokens) or best == NOWHERE or not waiting[best].worth > 0.0:
            return size
        taken = waiting[best]
        depth, on_path, above = taken.depth, taken.rank == taken.twin, taken.worth
        out_tokens[size] = expected[depth] if on_path else tokens[depth, taken.rank]
        parents[size], ranks[size], reach[size] = taken.parent, taken.rank, taken.worth
        size += 1

        following = taken.rank + (2 if taken.rank + 1 == taken.twin else 1)
        if not on_path and following < top_k:  # its next sibling takes its place
            waiting[best] = taken._replace(worth=taken.share * known[depth, following], rank=following)
        else:
            waiting[best] = waiting[-1]
            waiting.pop()
        row, depth = size, depth + 1


class _Waiting(NamedTuple):
    """A node that could come next: its reach, and by what its head's probabilities are multiplied."""

    worth: np.float32
    share: np.float32
    parent: int
    depth: int
    rank: int
    twin: int
