"""Drafted trees of Model Runner V2, on the device: by request slot while they wait, by batch row in their step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.host.v2.rows import RowBuffers
from vllm_medusa.tree.tensor_lookup import TensorExpected, TensorLookups
from vllm_medusa.tree.tensors import TensorTrees, climb
from vllm_medusa.tree.topology import num_words
from vllm_medusa.tree.walk import Walk


@dataclass
class StepTrees:
    """R requests of one step, up to n nodes each.

    A request whose rows begin inside its prompt has drafts that fill a place and stand for nothing: no nodes. A tree
    that the scheduler cut is a prefix of what was drafted.

    Attributes:
        batch: the host's batch that this is about.
        parents: int64 [R, n], row of each node's parent; -1 where there is no node.
        num_nodes: int64 [R].
        first_token: int64 [R], index of each root among the step's tokens.
        first_logit: int64 [R], index of each root among the rows of logits.
        context: int64 [R], tokens in the cache before the root.
        depths: int64 [R, n + 1], ancestors: int64 [R, n + 1, W], of each row.
        rows: int64 [L], the step's tokens that have a row of logits; shift: int64 [L], from where the host puts each to
            its depth.
        walk: its outcome, once walked.
    """

    batch: Any
    parents: Tensor
    num_nodes: Tensor
    first_token: Tensor
    first_logit: Tensor
    context: Tensor
    depths: Tensor
    ancestors: Tensor
    rows: Tensor
    shift: Tensor
    walk: Walk | None = None

    @property
    def width(self) -> int:
        """The most nodes of any request (n)."""
        return self.parents.shape[1]

    def moves(self) -> tuple[Tensor, Tensor]:
        """What the commit moves, by depth: int64 [R, D] and int64 [R, D], indices among the step's tokens: of accepted
        rows, -1 where nothing moves, and of those whose slots they take."""
        assert self.walk is not None
        path = self.walk.rows[:, 1:]
        depth = torch.arange(1, path.shape[1] + 1, device=path.device)
        moved = (path >= 0) & (path != depth)
        first = self.first_token[:, None]
        return (first + path).where(moved, -1), first + depth.where(moved, 0)

    def rows_of(self, values: Tensor, fill: int = 0) -> Tensor:
        """Spread values by row of logits [L] over [R, n + 1]; `fill` where a request has no such row."""
        index = self.first_logit[:, None] + torch.arange(self.width + 1, device=values.device)
        rows = values[index.clamp(max=len(values) - 1)]
        return rows.where(torch.arange(self.width + 1, device=values.device) <= self.num_nodes[:, None], fill)


class SlotTrees:
    """One tree per request slot, at fixed addresses; nothing here waits for the device.

    Attributes:
        step: the trees of the step that runs now; None if it checks none.
        rows: where attention on a GPU reads what they may see; None on a CPU.
        max_depth: no node is deeper; set once the heads are known.
        lookups: what texts expect next; None: they are not asked. Set with `max_depth`.
    """

    def __init__(self, req_states: Any, num_nodes: int, device: torch.device) -> None:
        """Room for the slots of the host's `req_states`, N = `num_nodes` nodes each: no nodes so far."""
        slots = req_states.max_num_reqs
        self._req_states = req_states
        self.num_nodes = num_nodes
        self.max_depth = num_nodes
        self.parents = torch.full((slots, num_nodes), -1, dtype=torch.int64, device=device)
        self.ranks = torch.full_like(self.parents, -1)
        self.reach = torch.zeros(slots, num_nodes, device=device)
        self.depths = torch.zeros(slots, num_nodes + 1, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(slots, num_nodes + 1, num_words(num_nodes), dtype=torch.int64, device=device)
        self.step: StepTrees | None = None
        self.rows: RowBuffers | None = None
        self.lookups: TensorLookups | None = None

    def put(self, slots: Tensor, trees: TensorTrees) -> None:
        """Remember the trees that were drafted for `slots` (int64 [R])."""
        depths, ancestors = climb(trees.parents, self.max_depth)
        self.parents[slots] = trees.parents
        self.ranks[slots] = trees.ranks
        self.reach[slots] = trees.reach
        self.depths[slots] = depths
        self.ancestors[slots] = ancestors

    def clear(self, slot: int) -> None:
        """A slot has a new request: what was drafted for the one before is none of its nodes."""
        self.parents[slot].fill_(-1)
        self.ranks[slot].fill_(-1)
        self.reach[slot].zero_()
        self.depths[slot].zero_()
        self.ancestors[slot].zero_()
        if self.lookups is not None:
            self.lookups.clear(slot)

    def depth_of(self, step: StepTrees) -> int:
        """No walk of the step goes deeper."""
        return min(self.max_depth, step.width)

    @property
    def lengths(self) -> Tensor:
        """int32 [slots], tokens of each slot's text, those of this step included once they are drawn."""
        lengths: Tensor = self._req_states.total_len.gpu
        return lengths

    def expected(self, slots: Tensor, longest: int) -> TensorExpected | None:
        """What the texts of `slots` (int64 [R]) expect next, the tokens of this step included; None: nobody asks.

        For a prompt that is not computed to its end it is what follows the whole of it.

        Args:
            slots: each once.
            longest: no text is longer.
        """
        if self.lookups is None:
            return None
        return self.lookups.follow(self._req_states.all_token_ids.gpu, self.lengths, slots, longest)

    def lay(self, batch: Any) -> None:
        """Lay the scheduled trees over the host's batch, and give nodes their depth as position.

        The positions of `batch` are written in place, after the host has computed slots from them.
        """
        self.step = None
        if batch.num_draft_tokens == 0:
            return
        slots, count = batch.idx_mapping, batch.num_reqs
        bounds = batch.cu_num_logits.to(torch.int64)
        rows = bounds[1:] - bounds[:-1]
        context = batch.seq_lens[:count].to(torch.int64) - rows
        known = self._req_states.prefill_len.gpu[slots].to(torch.int64)
        num_nodes = (rows - 1).where(context >= known, 0)
        width = int(batch.num_draft_tokens_per_req.max())
        is_node = torch.arange(width, device=slots.device) < num_nodes[:, None]
        parents = self.parents[slots, :width].where(is_node, -1)
        places, of_row, local = batch.logits_indices, batch.expanded_idx_mapping, batch.expanded_local_pos.long()
        has_tree = batch.positions[places] - local >= self._req_states.prefill_len.gpu[of_row]
        of_rows = self.depths[of_row, local]
        shift = (of_rows - local).where(has_tree, 0)
        self.step = StepTrees(
            batch=batch,
            parents=parents,
            num_nodes=num_nodes,
            first_token=batch.query_start_loc[1 : count + 1].to(torch.int64) - rows,
            first_logit=bounds[:-1],
            context=context,
            depths=self.depths[slots, : width + 1],
            ancestors=self.ancestors[slots, : width + 1],
            rows=places,
            shift=shift,
        )
        batch.positions[places] += shift
        if self.rows is not None:
            self.rows.put(places, local, has_tree, of_rows, self.ancestors[of_row, local])
