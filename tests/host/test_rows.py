"""What rows of a step may see, at fixed addresses: trees where there are trees, chains everywhere else."""

from __future__ import annotations

import torch

from vllm_medusa.host.v2.rows import RowBuffers
from vllm_medusa.tree.tensors import climb

NODES = 70  # two words of ancestor bits


def test_rows_are_causal_before_any_tree() -> None:
    """A graph may be recorded with them."""
    rows = RowBuffers(150, 4, NODES, torch.device("cpu"))
    assert rows.depths.tolist() == [row % (NODES + 1) for row in range(150)]
    seen = [int(low).bit_count() + int(high).bit_count() for low, high in (rows.ancestors & (2**63 - 1)).tolist()]
    signs = (rows.ancestors < 0).sum(dim=1).tolist()  # the bit that an int64 counts as its sign
    assert [a + b for a, b in zip(seen, signs, strict=True)] == rows.depths.tolist()


def test_trees_are_written_where_they_stand_and_nowhere_else() -> None:
    rows = RowBuffers(12, 4, 3, torch.device("cpu"))
    depths, ancestors = climb(torch.tensor([[0, 0, 1]]), 3)
    places, local = torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([0, 1, 2, 3, 0, 1])
    has_tree = torch.tensor([True] * 4 + [False] * 2)
    own_depths, own = torch.cat([depths[0], torch.tensor([9, 9])]), torch.cat([ancestors[0], ancestors[0, :2] + 8])
    before = rows.depths.clone(), rows.ancestors.clone()
    rows.put(places, local, has_tree, own_depths, own)
    assert rows.depths[4:8].tolist() == [0, 1, 1, 2] and rows.ancestors[4:8, 0].tolist() == [0, 1, 2, 5]
    assert rows.depths[8:10].tolist() == [0, 1] and rows.ancestors[8:10, 0].tolist() == [0, 1], "a chain"
    for now, then in zip((rows.depths, rows.ancestors), before, strict=True):
        assert torch.equal(now[:4], then[:4]) and torch.equal(now[10:], then[10:])


def test_cached_tokens_of_requests_and_of_those_that_fill_up_a_graph() -> None:
    rows = RowBuffers(12, 4, 3, torch.device("cpu"))
    lengths, starts = torch.tensor([20, 9, 0], dtype=torch.int32), torch.tensor([0, 4, 6, 6], dtype=torch.int32)
    context = rows.set_context(lengths, starts)
    assert context.tolist() == [16, 7, 0] and context.data_ptr() == rows.context.data_ptr()
    recorded = rows.set_context(torch.ones(2, dtype=torch.int32), torch.tensor([0, 4, 8]))
    assert recorded.tolist() == [0, 0], "lengths with which the host records say less than there are rows"
