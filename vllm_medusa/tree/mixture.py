"""Trees grown from two sources: the heads' candidates, and what the request's own text expects next.

At a node on the lookup's path the next token is the lookup's with probability a, else the heads are asked:

    q(t) = a [t = lookup] + (1 - a) p(t)          elsewhere q = p

so a token that both name gains, and the heads' other tokens lose. Growth is best-first, as in growth.py, where one
table of products no longer does: the lookup's path has probabilities of its own and may be deeper than there are heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

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
    batch = len(tokens)
    grown = MixedTrees(
        np.full((batch, num_nodes), -1, dtype=np.int64),
        np.full((batch, num_nodes), -1, dtype=np.int64),
        np.zeros((batch, num_nodes), dtype=np.int64),
        np.zeros((batch, num_nodes), dtype=np.float32),
        np.zeros(batch, dtype=np.int64),
    )
    _grow_all(tokens, probabilities, expected.tokens, expected.odds, *grown)
    return grown


@numba.njit(cache=True, nogil=True)
def _grow_all(tokens, probabilities, expected, odds, out_tokens, parents, ranks, reach, sizes):  # type: ignore[no-untyped-def]
    for row in range(len(tokens)):
        sizes[row] = _grow(
            tokens[row],
            probabilities[row],
            expected[row],
            odds[row],
            out_tokens[row],
            parents[row],
            ranks[row],
            reach[row],
        )


@numba.njit(cache=True, nogil=True)
def _grow(tokens, probabilities, expected, odds, out_tokens, parents, ranks, reach):  # type: ignore[no-untyped-def]
    """Grow one tree into the last four arrays; the number of its nodes.

    Of every node in the tree two may be waiting: its best child among the heads' that is not in the tree yet, and its
    child on the lookup's path. They are few, so a scan for the best is quicker than a heap.
    """
    num_heads, top_k = tokens.shape
    num_nodes = len(out_tokens)
    worth = np.empty(2 * num_nodes + 2, np.float32)  # reach of each that waits
    share = np.empty(2 * num_nodes + 2, np.float32)  # by which its head's probabilities are multiplied
    facts = np.empty((2 * num_nodes + 2, 4), np.int64)  # row of its parent, its depth, its rank, its parent's twin
    waiting = size = 0
    row, depth, above, on_path = 0, 0, np.float32(1.0), True  # whose children come next: the root's
    while True:
        twin, left = NOWHERE, above  # the head's candidate that the lookup names too
        if on_path and depth < len(expected) and expected[depth] >= 0:
            left = above * (np.float32(1.0) - odds[depth])
            value = above * odds[depth]
            twin = top_k
            if depth < num_heads:
                for rank in range(top_k):
                    if tokens[depth, rank] == expected[depth]:
                        twin = rank
                        value += left * _known(probabilities[depth, rank])
                        break
            worth[waiting], share[waiting] = min(value, above), left
            facts[waiting] = row, depth, twin, twin
            waiting += 1
        first = 1 if twin == 0 else 0
        if depth < num_heads and first < top_k:
            worth[waiting], share[waiting] = left * _known(probabilities[depth, first]), left
            facts[waiting] = row, depth, first, twin
            waiting += 1

        best = 0
        for place in range(1, waiting):
            if worth[place] > worth[best]:
                best = place
        if size == num_nodes or waiting == 0 or not worth[best] > 0.0:
            return size
        parent, depth, rank, twin = facts[best]
        on_path = rank == twin
        out_tokens[size] = expected[depth] if on_path else tokens[depth, rank]
        parents[size], ranks[size], reach[size] = parent, rank, worth[best]
        above = worth[best]
        size += 1

        following = rank + 2 if rank + 1 == twin else rank + 1
        if not on_path and following < top_k:  # its next sibling takes its place
            worth[best] = share[best] * _known(probabilities[depth, following])
            facts[best, 2] = following
        else:
            waiting -= 1
            worth[best], share[best], facts[best] = worth[waiting], share[waiting], facts[waiting]
        row, depth = size, depth + 1


@numba.njit(cache=True, nogil=True)
def _known(probability):  # type: ignore[no-untyped-def]
    """A NaN is no confidence."""
    return probability if probability > 0.0 else np.float32(0.0)
