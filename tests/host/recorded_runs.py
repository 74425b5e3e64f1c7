"""Hidden rows recorded on Model Runner V2, in the process where Triton is interpreted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from device_engines import engine
from engines import random_prompts

from vllm_medusa.heads.target import read_target
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.data import record_answers
from vllm_medusa.training.engine import RECORDER
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.said import Said


def record(model: Path, heads: Path, folder: Path, is_async: bool, **options: Any) -> dict[str, Any]:
    """Answer prompts and say how the rows fit what was said.

    Args:
        model: folder.
        heads: not used.
        folder: for the stores.
        is_async: whether steps are scheduled before the tokens of the one before are known.
        options: of the engine.
    """
    started = engine(model, is_async=is_async, worker_cls=RECORDER, **options)
    scheduler = started.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **k: (preempted.append(1), preempt(*a, **k))[1]
    prompts = random_prompts(np.random.default_rng(3), [3, 40, 1, 60, 21, 33, 9])
    asked = AnswerOptions(max_new_tokens=30, max_model_len=192, shard_size=4, temperatures=(0.0, 0.8))
    shards = record_answers(prompts, folder, asked, SimpleNamespace(llm=started.llm))  # type: ignore[arg-type]
    rows, target = HiddenRows.open(shards[:2]), read_target(model)
    chosen = target.logits(rows.gather(np.arange(len(rows))).float()).argmax(1).numpy()
    said = [Said.read(shard) for shard in shards]
    return {
        "v2": started.llm.llm_engine.vllm_config.use_v2_model_runner,
        "rows": len(HiddenRows.open(shards)),
        "answers": int(rows.sequences[-1]) + 1,
        "right": float((chosen == rows.tokens).mean()),
        "said": max(one.distance(target) for one in said if one is not None),
        "preempted": len(preempted),
    }
