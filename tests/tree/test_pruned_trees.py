"""A tree cut down to some of its nodes, as under a grammar: each kept node has the path that it had."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.topology import Tree, keep_nodes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """Parents, and nodes whose parents are the root or among them."""
    parents = tuple(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 40))))
    kept: list[int] = []
    for node, parent in enumerate(parents):
        if (parent == 0 or parent - 1 in kept) and draw(st.booleans()):
            kept.append(node)
    return parents, kept


@given(cuts())
def test_kept_nodes_keep_their_paths(cut: tuple[tuple[int, ...], list[int]]) -> None:
    parents, kept = cut
    found = keep_nodes(np.array(parents, dtype=np.int64), np.array(kept, dtype=np.int64))
    whole, small = Tree(parents), Tree(tuple(found.tolist()))
    for row, node in enumerate(kept, start=1):
        assert [kept[above - 1] for above in small.path(row)] == [above - 1 for above in whole.path(node + 1)]
