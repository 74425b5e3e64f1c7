"""More text than disk: the target answers some prompts, heads learn from that once, the rows are deleted, and on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.target import Target
from vllm_medusa.training.answering import SHARD, AnswerOptions
from vllm_medusa.training.data import read_facts
from vllm_medusa.training.hidden import HIDDEN, INDEX, HiddenRows
from vllm_medusa.training.lessons import Lessons
from vllm_medusa.training.loop import draft_targets
from vllm_medusa.training.ranks import Ranks
from vllm_medusa.training.recorded import Recording, check_rows
from vllm_medusa.training.snapshot import Snapshots
from vllm_medusa.training.step import LoopOptions, Progress, Run
from vllm_medusa.training.teacher import make_teacher

_PARTS = 4  # shards that fit into what is kept, were every answer as long as it may be


def shard_for(keep_rows: int, answers: AnswerOptions) -> AnswerOptions:
    """The same options, with shards of which some fit into `keep_rows` rows.

    Raises:
        MedusaError: hardly one answer does.
    """
    least = _PARTS * answers.longest_answer
    if keep_rows < least:
        fix = (
            f"keep {least} or more, room for {_PARTS} answers of {answers.longest_answer} tokens, or make these shorter"
        )
        raise MedusaError.of("keep_rows", keep_rows, fix)
    return replace(answers, shard_size=min(SHARD, keep_rows // least))


def windows(
    answer: Callable[[int], Sequence[Path]], keep_rows: int, max_tokens: int
) -> Iterator[tuple[list[Path], list[Path]]]:
    """Stores to learn from together, made when they are asked for; and all stores so far.

    Which belong together follows from what they say of themselves, so a run that goes on finds the same ones, though
    the rows of the first may be gone.

    Args:
        answer: gives the first stores that hold so many tokens, or all.
        keep_rows: about what one window may hold.
        max_tokens: of all.
    """
    window: list[Path] = []
    done: list[Path] = []
    total = held = 0
    while total < max_tokens:
        shards = answer(total + 1)
        if len(shards) == len(done):
            break  # the prompts are all answered
        for shard in shards[len(done) :]:
            tokens = read_facts(shard)["tokens"]
            window.append(shard)
            done.append(shard)
            total, held = total + tokens, held + tokens
            if held >= keep_rows * (_PARTS - 1) // _PARTS:
                yield window, done
                window, held = [], 0
    if window:
        yield window, done


def tokens_of(shards: Sequence[Path]) -> npt.NDArray[np.int32]:
    """The tokens of finished stores, in no order; known when their rows are gone, too."""
    index = np.concatenate([np.fromfile(shard / INDEX, dtype=np.int32).reshape(-1, 3) for shard in shards])
    return np.ascontiguousarray(index[index[:, 0] >= 0, 2])


def learn_in_windows(
    recording: Recording,
    first_heads: Callable[[HiddenRows, npt.NDArray[np.int32]], MedusaHeads],
    snapshots_of: Callable[[npt.NDArray[np.int32]], Snapshots],
    target: Target,
    options: LoopOptions,
    keep_rows: int,
    max_tokens: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[MedusaHeads, Progress, list[Path], HiddenRows, Snapshots]:
    """Train heads on answers as they come, each row once; a killed run goes on to the same heads, bit for bit.

    Args:
        recording: begun.
        first_heads: makes them, from rows and from the tokens of the first window.
        snapshots_of: where the run stands, by the same tokens.
        target: whose distributions are asked.
        options: see LoopOptions; one epoch.
        keep_rows, max_tokens: see `windows`.
        on_progress: told after each step.

    Returns:
        The heads, where training ended, all stores, some rows, and the snapshots, to be removed.
    """
    run: Run | None = None
    asked = recording.folder / "teacher-window"
    every: list[Path] = []
    for number, (window, every) in enumerate(windows(recording.answer, keep_rows, max_tokens)):  # noqa: B007
        if run is None and number == 0:
            tokens = tokens_of(window)
            snapshots = snapshots_of(tokens)
            state = snapshots.read() or {"window": 0, "began": 0}
        if number < state["window"]:
            _forget(window)
            continue
        for shard in window:
            check_rows(shard)
        rows = HiddenRows.open(window)
        if run is None:
            heads = first_heads(rows, tokens)
            heads.requires_grad_(True).train()
        teacher = None
        if options.loss != "ce":
            teacher = make_teacher(target, heads.token_map, rows, asked)
        lessons = Lessons(draft_targets(rows, heads), options.loss, teacher)
        useful = lessons.useful()
        if run is None:
            steps = _steps(recording, window, len(useful) / max(len(rows), 1), options, max_tokens)
            steps = state["progress"]["steps"] if "progress" in state else steps
            run = Run(heads, rows, lessons, options, steps, Ranks())
            run.restore(snapshots, lambda words: None)
        run.rows, run.lessons = rows, lessons
        began = state["began"] if number == state["window"] else run.progress.step
        order = np.random.default_rng([options.seed, number]).permutation(useful)
        for first in range((run.progress.step - began) * options.batch_size, len(order), options.batch_size):
            run.step(np.sort(order[first : first + options.batch_size]))
            if snapshots.due():
                snapshots.keep({**run.state(), "window": number, "began": began})
            on_progress(run.progress)
        snapshots.keep({**run.state(), "window": number + 1, "began": run.progress.step})
        _forget(window)
        shutil.rmtree(asked, ignore_errors=True)
    if run is None:  # killed behind its last window: everything is in the snapshot, and any rows will do
        rows = recording.held_out
        heads = first_heads(rows, tokens)
        run = Run(heads, rows, Lessons(draft_targets(rows, heads)), options, state["progress"]["steps"], Ranks())
        run.restore(snapshots, lambda words: None)
    heads.requires_grad_(False).eval()
    return heads, run.progress, every, rows, snapshots


def _steps(recording: Recording, window: Sequence[Path], useful: float, options: LoopOptions, max_tokens: int) -> int:
    """Steps of the whole run, by the answers of the first window."""
    facts = [read_facts(shard) for shard in window]
    a_prompt = sum(fact["tokens"] for fact in facts) / sum(fact["prompts"] for fact in facts)
    tokens = min(max_tokens, a_prompt * recording.num_prompts)
    return max(1, math.ceil(tokens * useful / options.batch_size))


def _forget(window: Sequence[Path]) -> None:
    """Delete the rows of finished stores, not what they say of themselves."""
    for shard in window:
        (shard / HIDDEN).unlink(missing_ok=True)
