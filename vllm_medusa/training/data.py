"""Self-distillation data: the target answers prompts through vLLM itself, and its hidden rows are kept.

Medusa heads guess what *this* target says next, so they learn from its own answers (Cai et al. 2024, arXiv:2401.10774,
section 2.3.2), greedy or sampled. Answers are made in shards; a shard that is finished carries
a `done.json` and is never made again, so a killed run goes on where it stopped.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.engine import RECORDER, Engine
from vllm_medusa.training.hidden import fill_tokens

DONE = "done.json"


@dataclass(frozen=True)
class AnswerOptions:
    """How the target answers: lengths in tokens, `batch_size` requests at once, `shard_size` prompts per shard."""

    max_new_tokens: int = 160
    max_model_len: int = 1024
    batch_size: int = 128
    shard_size: int = 512
    temperatures: tuple[float, ...] = (0.0,)  # one pass over all prompts each, until there are tokens enough; 0: greedy
    seed: int = 0
    dtype: str = "bfloat16"
    enforce_eager: bool = False  # do not compile the target: starts sooner, answers more slowly


def record_answers(
    ids: Sequence[list[int]],
    folder: Path,
    options: AnswerOptions,
    engine: "AnsweringEngine",
    *,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda prompts_done, tokens_done: None,
) -> list[Path]:
    """Answer prompts in order, shard by shard, until they end or `max_tokens` answer tokens exist.

    With several temperatures all prompts are answered at the first, then all again at the second, and so on.

    Args:
        ids: token ids of each prompt (see `render_prompts`); those that leave no room for an answer are left out.
        folder: where the shards lie; those of an earlier run are kept.
        options: see AnswerOptions.
        engine: asked only if there is something left to answer.
        max_tokens: None: no limit.
        on_progress: told after every shard.

    Returns:
        The finished stores (see hidden.py).

    Raises:
        MedusaError: no prompt leaves room; shards that were made at another temperature.
    """
    ids = [row for row in ids if leaves_room(row, options)]
    if not ids:
        fix = f"no prompt leaves room for {options.max_new_tokens} new tokens in {options.max_model_len}; raise it"
        raise MedusaError.of("max_model_len", options.max_model_len, fix)
    done, total = [], 0
    firsts = range(0, len(ids), options.shard_size)
    for number, (temperature, first) in enumerate(product(options.temperatures, firsts)):
        if max_tokens is not None and total >= max_tokens:
            break
        shard = folder / f"shard-{number:04d}"
        chosen = ids[first : first + options.shard_size]
        if not (shard / DONE).exists():
            _record_shard(engine.llm, chosen, shard, options, temperature, number * options.shard_size)
        facts = read_facts(shard)
        if facts["temperature"] != temperature:
            fix = f"{shard} was answered at {facts['temperature']}; name another work folder or delete it"
            raise MedusaError.of("temperatures", list(options.temperatures), fix)
        total += facts["tokens"]
        done.append(shard)
        on_progress(min((number + 1) * options.shard_size, len(ids) * len(options.temperatures)), total)
    return done


def fit_to_model(model: str, options: AnswerOptions) -> AnswerOptions:
    """The same options, with no longer texts than the model takes, of which an answer may be half.

    Args:
        model: folder of the target.
        options: see AnswerOptions.
    """
    if not (Path(model) / "config.json").is_file():
        return options  # nothing that vLLM could start; it says so itself when it is asked
    from vllm_medusa.host.positions import served_length

    length = served_length(model, options.max_model_len)
    return replace(options, max_model_len=length, max_new_tokens=min(options.max_new_tokens, length // 2))


def leaves_room(ids: list[int], options: AnswerOptions) -> bool:
    """Whether an answer fits behind a prompt."""
    return len(ids) + options.max_new_tokens <= options.max_model_len


def read_facts(shard: Path) -> dict[str, Any]:
    """What a finished shard says of itself: prompts, tokens, temperature, seconds."""
    facts: dict[str, Any] = json.loads((shard / DONE).read_text())
    return facts


class AnsweringEngine(Engine):
    """The target in vLLM with our recording worker."""

    def __init__(self, model: str, options: AnswerOptions, console: Console | None = None) -> None:
        """`console`: where it is told that vLLM starts; None: nowhere."""
        compiles = "" if options.enforce_eager else ", which compiles the model"
        super().__init__(f"starting vLLM{compiles}", console, worker_cls=RECORDER, **engine_arguments(model, options))


def engine_arguments(model: str, options: AnswerOptions) -> dict[str, Any]:
    """What the target's engines are started with, recording or not."""
    return {
        "model": model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.batch_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": False,
        "seed": options.seed,
    }


def _record_shard(
    llm: Any, ids: Sequence[list[int]], shard: Path, options: AnswerOptions, temperature: float, number: int
) -> None:
    """Answer `ids` into a new store; `number`, different for every shard, keeps the seeds of answers apart."""
    from vllm import SamplingParams

    if shard.exists():
        shutil.rmtree(shard)  # half a shard from a killed run
    params = [
        SamplingParams(temperature=temperature, max_tokens=options.max_new_tokens, seed=options.seed + number + i)
        for i in range(len(ids))
    ]
    began = time.monotonic()
    llm.collective_rpc("start_recording", kwargs={"folder": str(shard.resolve())})
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    names: list[str] = next(filter(None, llm.collective_rpc("finish_recording")), [])
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    fill_tokens(shard, answers, places(names, [output.request_id for output in outputs]))
    facts = {
        "prompts": len(ids),
        "tokens": sum(map(len, answers)),
        "temperature": temperature,
        "seconds": round(time.monotonic() - began, 1),
    }
    partial = shard / f"{DONE}.partial"
    partial.write_text(json.dumps(facts))
    os.replace(partial, shard / DONE)


def places(names: Sequence[str], asked: Sequence[str]) -> list[int]:
    """Which of the requests `asked` each of a store's sequences is.

    vLLM may append a random suffix to the request id that the caller sees.

    >>> places(["1-8f3a", "0"], ["0", "1"])
    [1, 0]
    """
    if len(names) != len(asked):
        raise RuntimeError(f"rows of {len(names)} of {len(asked)} answers were recorded")
    place = {name: number for number, name in enumerate(asked)}
    return [place[name if name in place else name.rsplit("-", 1)[0]] for name in names]
