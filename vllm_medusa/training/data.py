"""Self-distillation data: the target answers prompts through vLLM itself, and its hidden rows are kept.

Medusa heads guess what *this* target says next, so they learn from its own answers (Cai et al. 2024, arXiv:2401.10774,
section 2.3.2), with its chat template where there is one. Answers are made in shards; a shard that is finished carries
a `done.json` and is never made again, so a killed run goes on where it stopped.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.hidden import HiddenRows

RECORDER = "vllm_medusa.host.recording.RecordingWorker"
DONE = "done.json"


@dataclass(frozen=True)
class AnswerOptions:
    """How the target answers: lengths in tokens, `batch_size` requests at once, `shard_size` prompts per shard."""

    max_new_tokens: int = 160
    max_model_len: int = 1024
    batch_size: int = 128
    shard_size: int = 512
    temperature: float = 0.0  # of the sampled share; 0 makes every answer greedy
    sampled_share: float = 0.0  # share of prompts answered at `temperature`, the rest greedily
    seed: int = 0
    dtype: str = "bfloat16"


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSON-lines file: each line has `prompt`, or `turns` of which the first is used."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MedusaError.of("prompts", str(path), f"cannot be read ({error}); give a JSON-lines file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"] if "prompt" in row else row["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            fix = 'each line must be a JSON object with "prompt", or with "turns" that is not empty'
            raise MedusaError.of("prompts", f"{path}:{number}", fix) from error
        if not isinstance(prompt, str) or not prompt:
            raise MedusaError.of("prompts", f"{path}:{number}", "the prompt must be a string that is not empty")
        prompts.append(prompt)
    if not prompts:
        raise MedusaError.of("prompts", str(path), "the file holds no prompt; give at least one line")
    return prompts


def render_prompts(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as the target sees it: chat template applied when its tokenizer has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        return [tokenizer(prompt)["input_ids"] for prompt in prompts]
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def record_answers(
    model: str,
    prompts: Sequence[str],
    folder: Path,
    options: AnswerOptions,
    *,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda prompts_done, tokens_done: None,
    engine: "AnsweringEngine | None" = None,
) -> list[Path]:
    """Answer `prompts` in order, shard by shard, until they end or `max_tokens` answer tokens exist.

    Returns the finished stores (see hidden.py). Shards made by an earlier run with the same folder are kept.
    `engine`: one to share between several calls; else one is started here when there is work for it.
    """
    if engine is None:
        with AnsweringEngine(model, options) as own:
            return record_answers(
                model, prompts, folder, options, max_tokens=max_tokens, on_progress=on_progress, engine=own
            )
    ids = [row for row in render_prompts(model, prompts) if len(row) + options.max_new_tokens <= options.max_model_len]
    if not ids:
        fix = f"no prompt leaves room for {options.max_new_tokens} new tokens in {options.max_model_len}; raise it"
        raise MedusaError.of("max_model_len", options.max_model_len, fix)
    done, total = [], 0
    for first in range(0, len(ids), options.shard_size):
        if max_tokens is not None and total >= max_tokens:
            break
        shard = folder / f"shard-{first // options.shard_size:04d}"
        chosen = ids[first : first + options.shard_size]
        if not (shard / DONE).exists():
            _record_shard(engine.llm, chosen, shard, options, first)
        total += int(json.loads((shard / DONE).read_text())["tokens"])
        done.append(shard)
        on_progress(min(first + len(chosen), len(ids)), total)
    return done


class AnsweringEngine:
    """The target in vLLM with our recording worker: started by the first answer it is asked for, stopped on exit."""

    def __init__(self, model: str, options: AnswerOptions) -> None:
        self._model, self._options = model, options
        self._llm: Any = None

    def __enter__(self) -> "AnsweringEngine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()  # its memory is wanted for training
            self._llm = None

    @property
    def llm(self) -> Any:
        """vLLM's LLM; the first use starts it, a minute or two."""
        if self._llm is None:
            # Settings vLLM reads from the environment only. The user's own values win.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the recorder reads Model Runner V1
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
            from vllm import LLM

            self._llm = LLM(
                model=self._model,
                dtype=self._options.dtype,
                max_model_len=self._options.max_model_len,
                max_num_seqs=self._options.batch_size,
                enable_prefix_caching=False,
                async_scheduling=False,
                seed=self._options.seed,
                worker_cls=RECORDER,
            )
        return self._llm


def _record_shard(llm: Any, ids: Sequence[list[int]], shard: Path, options: AnswerOptions, first: int) -> None:
    from vllm import SamplingParams

    if shard.exists():
        shutil.rmtree(shard)  # half a shard from a killed run
    sampled = np.random.default_rng([options.seed, first]).random(len(ids)) < options.sampled_share
    params = [
        SamplingParams(
            temperature=options.temperature if sampled[i] else 0.0,
            max_tokens=options.max_new_tokens,
            seed=options.seed + first + i,
        )
        for i in range(len(ids))
    ]
    began = time.monotonic()
    llm.collective_rpc("start_recording", kwargs={"folder": str(shard.resolve())})
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    names = llm.collective_rpc("finish_recording")[0]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    _check_complete(shard, names, {output.request_id: answer for output, answer in zip(outputs, answers, strict=True)})
    facts = {
        "prompts": len(ids),
        "tokens": sum(map(len, answers)),
        "sampled_prompts": int(sampled.sum()),
        "seconds": round(time.monotonic() - began, 1),
    }
    (shard / DONE).write_text(json.dumps(facts))


def _check_complete(shard: Path, names: Sequence[str], answers: dict[str, list[int]]) -> None:
    """Every answer must be in the store, token for token: a missed or doubled row would teach the heads nonsense."""
    rows = HiddenRows.open([shard])
    for number, name in enumerate(names):
        # vLLM may append a random suffix to the request id that the caller sees ("12" becomes "12-8f3a").
        answer = answers[name if name in answers else name.rsplit("-", 1)[0]]
        if rows.tokens[rows.sequences == number].tolist() != answer:
            raise RuntimeError(f"recorded rows of request {name} in {shard} do not match its answer")
    if len(names) != len(answers):
        raise RuntimeError(f"{shard} holds {len(names)} of {len(answers)} answers")
