"""vLLM's schedulers alone, driven by outcomes that are written here: plain ones, and ours with drafts that all fail.

So a request says one token a step with trees as without, and whatever it waits for longer is the drafts' doing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 16
MAX_LEN = 512


@dataclass(frozen=True)
class Coming:
    """A request: the step before which it arrives, its prompt's and its answer's tokens."""

    arrives: int
    prompt: int
    tokens: int
    priority: int = 0


def make_scheduler(model: Path, heads: Path | None, *, asynchronous: bool, blocks: int, **limits: Any) -> Any:
    """A scheduler of vLLM's, or ours if there are heads.

    Args:
        model, heads: folders.
        asynchronous: the one that plans a step before it knows the outcome of the last.
        blocks: of the cache.
        limits: further engine arguments; `nodes` of each tree.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_medusa.host.scheduler import MedusaScheduler

    nodes = limits.pop("nodes", 0)
    medusa = {
        "method": "medusa", "model": str(heads), "num_speculative_tokens": nodes, "adaptive": False,
    }  # fmt: skip
    config = EngineArgs(
        model=str(model), max_model_len=MAX_LEN, block_size=BLOCK, enable_prefix_caching=False,
        skip_tokenizer_init=True, speculative_config=medusa if heads is not None else None, **limits,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = asynchronous  # which the CPU platform turns off
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    kind = MedusaScheduler if heads is not None else AsyncScheduler if asynchronous else Scheduler
    return kind(config, caches, StructuredOutputManager(config), BLOCK)


def play(scheduler: Any, coming: Sequence[Coming], nodes: int = 0) -> list[list[int]]:
    """Run requests to their ends; the steps whose outcomes gave each of them a token.

    Args:
        scheduler: whose every step's outcome comes one step later, if it is the asynchronous one.
        coming: in the order of arrival.
        nodes: drafted for each request after each step.
    """
    said: list[list[int]] = [[] for _ in coming]
    waiting = deque(enumerate(coming))
    late = scheduler.scheduler_config.async_scheduling
    planned: deque[Any] = deque()
    step = 0
    while waiting or planned or scheduler.has_unfinished_requests():
        while waiting and waiting[0][1].arrives <= step:
            number, request = waiting.popleft()
            scheduler.add_request(_request(number, request))
        plan = scheduler.schedule()
        if plan.num_scheduled_tokens:
            planned.append(plan)
        if planned and (len(planned) > late or not plan.num_scheduled_tokens):
            _read(scheduler, planned.popleft(), said, step, nodes, drafts_come=not late)
        step += 1
        assert step < 40_000, "requests do not end"
    return said


def _request(number: int, asked: Coming) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=asked.tokens, ignore_eos=True, temperature=0.0)
    return Request(
        str(number), [2 + number] * asked.prompt, params, None, arrival_time=float(number), priority=asked.priority
    )


def _read(scheduler: Any, plan: Any, said: list[list[int]], step: int, nodes: int, *, drafts_come: bool) -> None:
    """A step's outcome: a token for each request whose known tokens are computed, and new drafts."""
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    names = list(plan.num_scheduled_tokens)
    computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    cached = plan.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drawn = []
    for name in names:
        request = scheduler.requests.get(name)
        drafts = len(plan.scheduled_spec_decode_tokens.get(name, ()))
        done = computed[name] + plan.num_scheduled_tokens[name] - drafts
        # What is planned before an outcome is known counts drafts as computed that will have failed.
        complete = request is not None and done >= request.num_tokens
        drawn.append([7] if complete else [])
        if complete:
            said[int(name)].append(step)
    output = ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                               sampled_token_ids=drawn)  # fmt: skip
    scheduler.update_from_output(plan, output)
    if nodes and drafts_come:
        ids = [name for name, tokens in zip(names, drawn, strict=True) if tokens]
        scheduler.update_draft_token_ids(DraftTokenIds(ids, [[9] * nodes for _ in ids]))
