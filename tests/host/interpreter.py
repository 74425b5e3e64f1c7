"""Model Runner V2 on a CPU: a process in which Triton kernels are interpreted, and three of the host's are torch code.

`with interpreted() as child: child.submit(function, ...)` runs functions of importable modules there. Nothing that the
product ships is replaced: only what makes Triton believe that it can run here, and kernels that its interpreter cannot.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

ASYNC = False  # what engines that start now do about scheduling


@contextmanager
def interpreted() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, since Triton is told once, when it is imported."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=prepare) as child:
        try:
            yield child
        finally:
            child.submit(os._exit, 0)  # its engines are taken apart more quickly by the system


def prepare() -> None:
    """In the child, before it imports vLLM."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    _schedule_asynchronously()
    _replace_kernels()


def _schedule_asynchronously() -> None:
    """The CPU platform turns asynchronous scheduling off, since nothing on it is asynchronous: let tests decide."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = ASYNC

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _replace_kernels() -> None:
    """Top-k with top-p, and grammar masks: the interpreter of Triton 3.9 fails on their kernels."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.sample import sampler, states

    sampler.apply_top_k_top_p = states.apply_top_k_top_p = apply_top_k_top_p_pytorch

    def apply_grammar_bitmask(self: Any, logits: Any, batch: Any, names: list[str], bitmask: Any) -> None:
        stride = self.mask_stride
        rows = structured_outputs._build_grammar_mapping(
            batch.req_ids, names, batch.cu_num_logits_np, batch.num_draft_tokens_per_req, self.num_bonus_tokens, stride
        )
        masks = torch.from_numpy(bitmask)
        allowed = (masks[:, :, None] >> torch.arange(32)) & 1 == 1
        for row, tokens in zip(rows, allowed.flatten(1), strict=True):
            at = int(batch.cu_num_logits_np[row // stride]) + row % stride
            logits[at].masked_fill_(~tokens[: logits.shape[1]], -torch.inf)

    structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask
