"""What is drafted after a step on Model Runner V2: a tree for each request of the batch, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.slots import SlotTrees
from vllm_medusa.proposer import MedusaProposer
from vllm_medusa.tree.tensor_lookup import TensorExpected
from vllm_medusa.tree.tensors import TensorTrees


class MedusaSpeculator(BaseSpeculator):
    """Stands where the host has its drafter."""

    draft_logits = None  # nodes are the heads' likeliest tokens
    supports_mm_inputs = False

    def __init__(self, proposer: MedusaProposer, trees: SlotTrees, clock: StageClock[Any]) -> None:
        """Draft with `proposer` into `trees`, telling the `clock`."""
        self.proposer, self.trees, self.clock = proposer, trees, clock

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The heads are a few products after the step: no graphs of their own."""

    def capture(self) -> None:
        """Nothing to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft from the hidden row of the last node on each path.

        Args:
            input_batch: the host's batch of R requests.
            last_hidden_states: [tokens of the step, H], after the final norm.
            last_sampled: int64 [slots, 1], the last token of each request.
            dummy_run: nothing was computed for anybody.
            num_speculative_tokens: how many nodes the host will check; it cuts.
            attn_metadata, slot_mappings, aux_hidden_states, num_sampled, num_rejected, args, kwargs: unused.

        Returns:
            int64 [R, N], node tokens. What stands there for a prompt that is not computed to its end is never checked.
        """
        slots = input_batch.idx_mapping
        if dummy_run or num_speculative_tokens == 0:
            return torch.zeros(len(slots), self.trees.num_nodes, dtype=torch.int64, device=slots.device)
        step = self.trees.step
        if step is None or step.walk is None:
            rows = input_batch.query_start_loc[1 : len(slots) + 1].to(torch.int64) - 1
        else:
            walk = step.walk
            rows = step.first_token + walk.rows.gather(1, walk.lengths[:, None] - 1)[:, 0]
        known = input_batch.seq_lens_cpu_upper_bound.numpy()[: len(slots)]  # without the step's last token
        expected = self.trees.expected(slots, int(known.max()) + 1)
        drafted = self._draft(slots, last_hidden_states[rows], last_sampled[slots, 0], expected)
        self.trees.put(slots, drafted)
        self.clock.mark("propose")
        return drafted.tokens

    def _draft(self, slots: Tensor, hidden: Tensor, roots: Tensor, expected: TensorExpected | None) -> TensorTrees:
        """Trees for `slots` (int64 [R]), from their hidden rows [R, H], root tokens int64 [R] and texts."""
        return self.proposer.propose_tensors(hidden, roots, expected)
