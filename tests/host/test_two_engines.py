"""Data parallel with experts: two engines that step together, one dry steps while the other checks trees."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MAX_LEN, VOCAB, random_prompts, start
from tiny_targets import inspected_here, make_expert_group, save_target

LONG = pytest.mark.skipif(not os.environ.get("MEDUSA_LONG"), reason="five processes import vLLM: half a minute")
pytestmark = [pytest.mark.slow, LONG]
SETTINGS: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 32, "max_num_seqs": 8}


def test_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded requests, first all of them for one engine, then for both; drafts that come true."""
    from vllm import SamplingParams, envs

    model, heads = save_target("qwen3_moe", tmp_path)
    prompts = random_prompts(np.random.default_rng(3), [3, 8, 21, 33, 60, 90])
    params = [SamplingParams(max_tokens=20 + 8 * i, ignore_eos=True, temperature=i % 2, seed=i) for i in range(6)]
    make_expert_group()
    with inspected_here("Qwen3MoeForCausalLM"):
        truth = start(model, **SETTINGS).tokens(prompts, params)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    envs.disable_envs_cache()
    asyncio.run(_compare(model, heads, prompts, params, truth))


async def _compare(model: Path, heads: Path, prompts: list[list[int]], params: list[Any], truth: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, **SETTINGS}
    args = AsyncEngineArgs(
        model=str(model),
        data_parallel_size=2,
        speculative_config={"method": "medusa", "model": str(heads), "num_speculative_tokens": 12},
        worker_extension_cls="two_engines.TwoEngines",
        enable_prefix_caching=False,
        num_gpu_blocks_override=64,
        **settings,
    )
    with inspected_here("Qwen3MoeForCausalLM"):
        llm = AsyncLLM.from_engine_args(args)
    try:
        await _on_both(llm, "count_dry_steps")
        await _on_both(llm, "draft_what_is_true", prompts, truth, 12, VOCAB)
        for engine in (0, 1, None):
            assert await _answers(llm, prompts, params, engine) == truth
        first, second = await _on_both(llm, "dry_steps_so_far")
        assert min(first, second) > 10, "each ran dry while the other had everything to do"
        for report in await _on_both(llm, "medusa_report"):
            assert report["mean_accepted_length"] > 1.5
    finally:
        llm.shutdown()


async def _on_both(llm: Any, method: str, *args: Any) -> list[Any]:
    """What the worker of each engine answers."""
    told = await llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, {})
    return [one for (one,) in told]


async def _answers(llm: Any, prompts: list[list[int]], params: list[Any], engine: int | None) -> list[list[int]]:
    """Tokens of each request, all asked at once, of one engine or of whichever has less to do."""

    async def ask(number: int) -> list[int]:
        tokens: list[int] = []
        name, prompt = f"{engine}-{number}", {"prompt_token_ids": prompts[number]}
        async for output in llm.generate(prompt, params[number], name, data_parallel_rank=engine):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    return list(await asyncio.gather(*map(ask, range(len(prompts)))))
