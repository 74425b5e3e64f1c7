"""Trees by slot and by batch row, on batches written by hand: cut trees, drafts of nothing, slots used anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_medusa.host.v2.slots import SlotTrees
from vllm_medusa.tree.tensors import TensorTrees

# cat (sat, ran), dog (away)            the same, smaller
PARENTS = torch.tensor([[0, 1, 0, 1, 3], [0, 0, -1, -1, -1]])


def drawn(parents: torch.Tensor) -> TensorTrees:
    """Trees with these parents."""
    return TensorTrees(torch.zeros_like(parents), parents, parents.clamp(max=0), 0.5 * (parents >= 0))


def slot_trees() -> SlotTrees:
    """Six slots of five nodes; slots 4 and 1 have drafted."""
    trees = SlotTrees(SimpleNamespace(max_num_reqs=6), 5, torch.device("cpu"))
    trees.put(torch.tensor([4, 1]), drawn(PARENTS))
    return trees


def batch_of(slots: list[int], rows: list[int], scheduled: list[int], computed: list[int], prefill: list[int]) -> Any:
    """The host's batch: rows of logits, scheduled and computed tokens of each request; `prefill` is by slot."""
    starts = [0, *torch.tensor(scheduled).cumsum(0).tolist()]
    bounds = [0, *torch.tensor(rows).cumsum(0).tolist()]
    return SimpleNamespace(
        num_reqs=len(slots),
        num_draft_tokens=sum(rows) - len(rows),
        num_draft_tokens_per_req=torch.tensor(rows).numpy() - 1,
        idx_mapping=torch.tensor(slots),
        expanded_idx_mapping=torch.tensor(
            [slot for slot, count in zip(slots, rows, strict=True) for _ in range(count)]
        ),
        expanded_local_pos=torch.tensor([row for count in rows for row in range(count)], dtype=torch.int32),
        cu_num_logits=torch.tensor(bounds, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([c + s for c, s in zip(computed, scheduled, strict=True)], dtype=torch.int32),
        logits_indices=torch.tensor([e - n + r for e, n in zip(starts[1:], rows, strict=True) for r in range(n)]),
        positions=torch.cat([torch.arange(c, c + s) for c, s in zip(computed, scheduled, strict=True)]),
        prefill=torch.tensor(prefill, dtype=torch.int32),
    )


def lay(trees: SlotTrees, batch: Any) -> None:
    """Lay them over the batch."""
    trees._req_states.prefill_len = SimpleNamespace(gpu=batch.prefill)
    trees.lay(batch)


def test_a_mixed_batch() -> None:
    """A whole tree, one cut to three nodes, a prompt of one token with three drafts of nothing, a prompt in pieces."""
    trees = slot_trees()
    prefill = [9, 30, 1, 0, 20, 0]
    batch = batch_of([4, 1, 2, 0], [6, 4, 4, 1], [6, 4, 4, 5], [20, 30, 0, 2], prefill)
    lay(trees, batch)
    step = trees.step
    assert step is not None and step.width == 5
    assert step.num_nodes.tolist() == [5, 3, 0, 0]
    assert step.parents.tolist() == [[0, 1, 0, 1, 3], [0, 0, -1, -1, -1], [-1] * 5, [-1] * 5]
    assert step.context.tolist() == [20, 30, 0, 6]
    assert step.first_token.tolist() == [0, 6, 10, 18] and step.first_logit.tolist() == [0, 6, 10, 14]
    tree, cut = [20, 21, 22, 21, 22, 22], [30, 31, 31, 30]  # a padding node stands where its root does
    assert batch.positions.tolist() == [*tree, *cut, 0, 1, 2, 3, 2, 3, 4, 5, 6]


def test_rows_of_logits_by_request() -> None:
    trees = slot_trees()
    batch = batch_of([4, 1], [6, 2], [6, 2], [20, 30], [9, 9, 9, 9, 9, 9])
    lay(trees, batch)
    assert trees.step is not None
    assert trees.step.rows_of(torch.arange(8), -1).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, -1, -1, -1, -1]]


def test_steps_without_drafts_have_no_trees() -> None:
    trees = slot_trees()
    lay(trees, batch_of([4], [2], [2], [20], [9] * 6))
    assert trees.step is not None
    batch = batch_of([4], [1], [1], [20], [9] * 6)
    lay(trees, batch)
    assert trees.step is None and batch.positions.tolist() == [20]


def test_a_new_request_has_nothing_of_the_old_one() -> None:
    trees = slot_trees()
    trees.clear(4)
    batch = batch_of([4], [6], [6], [20], [9] * 6)
    lay(trees, batch)
    assert trees.step is not None and trees.step.parents.tolist() == [[-1] * 5]
    assert batch.positions.tolist() == [20] * 6 and not trees.step.ancestors.any()


def test_buffers_stay_where_they_are() -> None:
    """A captured graph reads them at fixed addresses."""
    trees = slot_trees()
    kept = [trees.parents, trees.ranks, trees.depths, trees.ancestors]
    before = [buffer.data_ptr() for buffer in kept]
    trees.put(torch.tensor([4, 1]), drawn(PARENTS.flip(0)))
    trees.clear(1)
    assert [buffer.data_ptr() for buffer in (trees.parents, trees.ranks, trees.depths, trees.ancestors)] == before
