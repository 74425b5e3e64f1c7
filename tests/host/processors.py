"""Logits processors of a user's own, as vLLM's interface has them; importable by name in worker processes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class NoRepeat(LogitsProcessor):
    """Forbids the `no_repeat` tokens said last."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, self._state)

    @staticmethod
    def _state(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[int, list[int]] | None:
        window = (params.extra_args or {}).get("no_repeat")
        return None if window is None else (window, output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (window, output) in self.rows.items():
            for token in output[-window:]:
                logits[row, token] = -torch.inf
        return logits


class Alternate(AdapterLogitsProcessor):
    """Allows even and odd tokens in turn, by counting its own calls: one per emitted token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("alternate"):
            return None
        calls = 0

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            logits[calls % 2 :: 2] = -torch.inf
            calls += 1
            return logits

        return process
