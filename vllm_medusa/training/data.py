"""Self-distillation data: the target answers prompts through vLLM itself, and its hidden rows are kept.

Medusa heads guess what *this* target says next, so they learn from its own answers (Cai et al. 2024, arXiv:2401.10774,
section 2.3.2), greedy or sampled. Answers are made in shards; a shard that is finished carries
a `done.json` and is never made again, so a killed run goes on where it stopped. Several processes may fill one folder:
each claims the shard that it makes (claims.py).
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.answering import AnsweringEngine, AnswerOptions, leaves_room
from vllm_medusa.training.claims import Claim
from vllm_medusa.training.hidden import fill_tokens

DONE = "done.json"
_LOOK_AGAIN = 1.0  # seconds
_SEEDS_OF_A_TURN = 2**26

Follow = Callable[[int, Sequence[Sequence[int]]], list[int] | None]


def record_answers(
    ids: Sequence[list[int]],
    folder: Path,
    options: AnswerOptions,
    engine: "AnsweringEngine",
    *,
    follow: Follow = lambda prompt, answers: None,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda prompts_done, tokens_done: None,
) -> list[Path]:
    """Answer prompts in order, shard by shard, until they end or `max_tokens` answer tokens exist.

    With several temperatures all prompts are answered at the first, then all again at the second, and so on. Other
    processes may do the same in the same folder at the same time: each shard is made by one of them, and what a killed
    one had begun is made by another.

    Args:
        ids: token ids of each prompt (see `render_prompts`); those that leave no room for an answer are left out.
        folder: where the shards lie; those of an earlier run are kept.
        options: see AnswerOptions.
        engine: asked only if there is something left to answer.
        follow: token ids of the next turn of prompt `prompt` (its number in `ids`) behind these answers; None: it was
            the last one.
        max_tokens: None: no limit.
        on_progress: told after every shard.

    Returns:
        The finished stores (see hidden.py).

    Raises:
        MedusaError: no prompt leaves room; shards that were made at another temperature.
    """
    asked = [(number, row) for number, row in enumerate(ids) if leaves_room(row, options)]
    if not asked:
        fix = f"no prompt leaves room for {options.longest_answer} new tokens in {options.longest}; raise it"
        raise MedusaError.of("max_model_len", options.longest, fix)
    firsts = range(0, len(asked), options.shard_size)
    wanted = [
        _Wanted(folder / f"shard-{number:04d}", asked[first : first + options.shard_size], t, number)
        for number, (t, first) in enumerate(product(options.temperatures, firsts))
    ]
    told = 0
    while True:
        done, total = _finished(wanted, max_tokens, options)
        if len(done) > told:
            told = len(done)
            on_progress(min(told * options.shard_size, len(asked) * len(options.temperatures)), total)
        if len(done) == len(wanted) or (max_tokens is not None and total >= max_tokens):
            return [shard.folder for shard in done]
        if not _make_one(wanted, len(done), total, max_tokens, engine, options, follow):
            time.sleep(_LOOK_AGAIN)  # others make what is left


@dataclass(frozen=True)
class _Wanted:
    """A shard: where it lies, its prompts by number, its temperature and its own number."""

    folder: Path
    prompts: list[tuple[int, list[int]]]
    temperature: float
    number: int

    @property
    def is_done(self) -> bool:
        return (self.folder / DONE).exists()

    @property
    def lock(self) -> Path:
        return self.folder.with_name(self.folder.name + ".lock")


def _finished(wanted: list[_Wanted], max_tokens: int | None, options: AnswerOptions) -> tuple[list[_Wanted], int]:
    """The first shards, as many as are there without a gap and as are wanted, and their tokens."""
    done, total = [], 0
    for shard in takewhile(lambda shard: shard.is_done, wanted):
        if max_tokens is not None and total >= max_tokens:
            break
        facts = read_facts(shard.folder)
        if facts["temperature"] != shard.temperature:
            fix = f"{shard.folder} was answered at {facts['temperature']}; name another work folder or delete it"
            raise MedusaError.of("temperatures", list(options.temperatures), fix)
        total += facts["tokens"]
        done.append(shard)
    return done, total


def _make_one(
    wanted: list[_Wanted],
    first: int,
    total: int,
    max_tokens: int | None,
    engine: "AnsweringEngine",
    options: AnswerOptions,
    follow: Follow,
) -> bool:
    """Make the first shard from `first` on that nobody else makes; False: there is none that will be wanted."""
    for shard in wanted[first:]:
        if max_tokens is not None and total >= max_tokens:
            return False  # by what others are likely to bring
        if shard.is_done:
            total += read_facts(shard.folder)["tokens"]
            continue
        with Claim(shard.lock) as claim:
            if claim.take():
                if not shard.is_done:  # by now
                    _record_shard(engine, shard, options, follow)
                return True
        total += len(shard.prompts) * options.longest_answer // 2
    return False


def read_facts(shard: Path) -> dict[str, Any]:
    """What a finished shard says of itself: prompts, tokens, temperature, seconds."""
    facts: dict[str, Any] = json.loads((shard / DONE).read_text())
    return facts


def _record_shard(engine: "AnsweringEngine", wanted: _Wanted, options: AnswerOptions, follow: Follow) -> None:
    """Answer a shard's prompts, turn by turn, into a new store, which gets its name when it is complete."""
    from vllm import SamplingParams

    for left in wanted.folder.parent.glob(f"{wanted.folder.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)  # of a killed run: the claim says that nobody is at it
    shutil.rmtree(wanted.folder, ignore_errors=True)
    shard = wanted.folder.with_name(f"{wanted.folder.name}.{os.uname().nodename}-{os.getpid()}.partial")
    llm, began = engine.llm, time.monotonic()
    llm.collective_rpc("start_recording", kwargs={"folder": str(shard.resolve())})
    said: dict[int, list[list[int]]] = {number: [] for number, _ in wanted.prompts}
    answers: list[list[int]] = []
    requests: list[str] = []
    turn, waiting = 0, wanted.prompts
    while waiting:
        # Seeds that differ for every answer of a run.
        first = options.seed + wanted.number * options.shard_size + turn * _SEEDS_OF_A_TURN
        params = [
            SamplingParams(temperature=wanted.temperature, max_tokens=options.longest_answer, seed=first + i)
            for i in range(len(waiting))
        ]
        outputs = llm.generate([{"prompt_token_ids": row} for _, row in waiting], params, use_tqdm=False)
        for (number, _), output in zip(waiting, outputs, strict=True):
            said[number].append(list(output.outputs[0].token_ids))
            answers.append(said[number][-1])
            requests.append(output.request_id)
        asked = [(number, follow(number, said[number])) for number, _ in waiting]
        waiting = [(number, row) for number, row in asked if row is not None and leaves_room(row, options)]
        turn += 1
    names: list[str] = next(filter(None, llm.collective_rpc("finish_recording")), [])
    fill_tokens(shard, answers, places(names, requests))
    facts = {
        "prompts": len(wanted.prompts),
        "answers": len(answers),
        "tokens": sum(map(len, answers)),
        "temperature": wanted.temperature,
        "seconds": round(time.monotonic() - began, 1),
    }
    (shard / DONE).write_text(json.dumps(facts))
    shard.replace(wanted.folder)


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
