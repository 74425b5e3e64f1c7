"""A logits processor as users write them for Model Runner V2."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class NoEcho(LogitsProcessor):
    """Forbids the last four tokens of a row's history."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self.req_states = req_states

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """For every request."""
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Committed tokens, then those of the rows before a row of the same request."""
        for row, (slot, local) in enumerate(
            zip(ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist(), strict=True)
        ):
            known = self.req_states.all_token_ids.gpu[slot, : int(self.req_states.total_len.gpu[slot])]
            history = known.tolist() + ctx.input_ids[row - local + 1 : row + 1].tolist()
            assert len(history) == int(ctx.pos[row]) + 1
            logits[row, history[-4:]] = -torch.inf
        return logits
