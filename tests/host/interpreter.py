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

# What engines that start now do about scheduling, and which attention of the host they get.
ASYNC = False
ATTENTION = "CPU_ATTN"
HOSTS_KERNEL = False  # whether Triton attention of the host is its own kernel, which takes the interpreter minutes


@contextmanager
def interpreted(*, v2: bool = True) -> Iterator[ProcessPoolExecutor]:
    """A process of its own, since Triton is told once, when it is imported; `v2`: which model runner serves there."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=prepare, initargs=("1" if v2 else "0",)) as child:
        try:
            yield child
        finally:
            child.submit(os._exit, 0)  # its engines are taken apart more quickly by the system


def prepare(v2: str = "1") -> None:
    """In the child, before it imports vLLM."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": v2, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    _let_tests_decide()
    _replace_kernels()


def _let_tests_decide() -> None:
    """The CPU platform turns asynchronous scheduling off, since nothing on it is asynchronous, and attends its way."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = ASYNC

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.get_attn_backend_cls = classmethod(lambda *_, **__: AttentionBackendEnum[ATTENTION].get_path())


def _replace_kernels() -> None:
    """Top-k with top-p, and grammar masks: the interpreter of Triton 3.9 fails on their kernels."""
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.sample import sampler, states

    for user in (sampler, states, topk_topp_sampler):
        user.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch

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
    _attend_more_quickly()


def _attend_more_quickly() -> None:
    """The host's paged attention, unless a test wants its kernel, or tokens of a prompt's pictures see each other."""
    import torch
    from vllm.v1.attention.backends import triton_attn

    from vllm_medusa.attention.reference import causal_attention

    kernel = triton_attn.unified_attention

    def gathered(cache: Any, *places: Any) -> Any:
        as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # float8 cannot be gathered
        return as_bytes[places].view(cache.dtype).float()

    def unified_attention(**given: Any) -> None:
        ranges = given["mm_prefix_range"]
        if HOSTS_KERNEL or (given["max_seqlen_q"] > 1 and ranges is not None and bool(ranges.any())):
            kernel(**given)
            return
        bounds, block = given["cu_seqlens_q"].tolist(), given["k"].shape[1]
        options = {"softcap": given["softcap"], "sliding_window": given["window_size"][0] + 1, "dtype": torch.float32}
        options["sinks"] = given["sinks"]
        scales = [1.0 if given[name] is None else float(given[name][0, 0]) for name in ("k_descale", "v_descale")]
        for request, length in enumerate(given["seqused_k"].tolist()):
            rows, slots = slice(*bounds[request : request + 2]), torch.arange(length)
            blocks = given["block_table"][request][slots // block].long()
            keys, values = (
                gathered(given[name], blocks, slots % block) * s for name, s in zip("kv", scales, strict=True)
            )
            if rows.stop > rows.start:
                given["out"][rows] = causal_attention(given["q"][rows], keys, values, given["softmax_scale"], **options)

    triton_attn.unified_attention = unified_attention


def choose(*, is_async: bool, attention: str) -> None:
    """What engines that start from now on are like."""
    global ASYNC, ATTENTION
    import torch
    from vllm.v1.attention import selector
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as writer

    ASYNC, ATTENTION = is_async, attention
    selector._cached_get_attn_backend.cache_clear()
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked for by the host's cache writer
    writer._is_supported_kv_cache_dtype = lambda _: True  # the interpreter knows float8 as an H100 does


def record_graphs(runner: Any, sizes: list[int]) -> Any:
    """Let steps of trees replay what was recorded, as CUDA graphs do, though each kernel is called anew. Steps of other
    shapes are filled up to a recorded size.

    A recorded step knows its tensors by address and every number as it was: whatever else a step needs is missing.

    Args:
        runner: of an engine that has started.
        sizes: tokens of the steps to record.

    Returns:
        The host's manager of graphs, whose `replays` counts them.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    class Recorded:
        def __init__(self, forward: Any) -> None:
            self.forward = forward

        def replay(self) -> None:
            manager.replays += 1
            self.forward(CUDAGraphMode.NONE)

    def capture(self: Any, create_forward_fn: Any, *_: Any) -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:  # other steps are filled up, and cut at attention
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            self.graphs[desc] = Recorded(create_forward_fn(desc, warmup=False))
            self.graphs[desc].forward(CUDAGraphMode.NONE)
        self._graphs_captured = True

    config = runner.compilation_config
    cudagraph_utils.has_compiled_submodule = lambda _: True
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, max(sizes)
    CudaGraphManager.capture, current_platform.get_global_graph_pool = capture, lambda: None
    manager = ModelCudaGraphManager(
        runner.vllm_config, runner.device, CUDAGraphMode.FULL_AND_PIECEWISE, runner.decode_query_len
    )
    manager.replays, manager.filled = 0, 0
    run_pw_graph = manager.run_pw_graph

    def filled(*args: Any) -> Any:
        manager.filled += 1
        return run_pw_graph(*args)

    manager.run_pw_graph = filled
    parts = (runner.input_buffers, None, runner.block_tables, runner.attn_groups, runner.kv_cache_config)
    manager.capture(runner.model, runner.model_state, *parts)
    runner.cudagraph_manager = manager
    return manager
