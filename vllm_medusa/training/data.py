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
from vllm_medusa.progress import stage
from vllm_medusa.quota import usable_cores
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


class AnsweringEngine:
    """The target in vLLM with our recording worker: started by the first answer it is asked for, stopped on exit."""

    def __init__(self, model: str, options: AnswerOptions, console: Console | None = None) -> None:
        """`console`: where it is told that vLLM starts; None: nowhere."""
        self._model, self._options = model, options
        self._console = console or Console(quiet=True)
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
            os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
            compiles = "" if self._options.enforce_eager else ", which compiles the model"
            with stage(self._console, f"starting vLLM{compiles}"):
                self._llm = self._start()
            self._llm.collective_rpc("end_with", args=(os.getpid(),))
        return self._llm

    def _start(self) -> Any:
        from vllm import LLM

        return LLM(
            model=self._model,
            dtype=self._options.dtype,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.batch_size,
            enforce_eager=self._options.enforce_eager,
            enable_prefix_caching=False,
            async_scheduling=False,
            seed=self._options.seed,
            worker_cls=RECORDER,
        )


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
    names = llm.collective_rpc("finish_recording")[0]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    _check_complete(shard, names, {output.request_id: answer for output, answer in zip(outputs, answers, strict=True)})
    facts = {
        "prompts": len(ids),
        "tokens": sum(map(len, answers)),
        "temperature": temperature,
        "seconds": round(time.monotonic() - began, 1),
    }
    partial = shard / f"{DONE}.partial"
    partial.write_text(json.dumps(facts))
    os.replace(partial, shard / DONE)


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
