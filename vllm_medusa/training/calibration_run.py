"""From held-out prompts to a calibration in the heads' config: the target answers, the heads guess along.

Step times are measured on the way and shown, but not stored: every server measures its own at start-up in a second or
two, under its own threads, number format and compilation, and goes on learning them while serving. Figures of another
day or machine could only replace better ones.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, load_heads, save_calibration
from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.source import locate_heads
from vllm_medusa.heads.target import read_target
from vllm_medusa.progress import stage
from vllm_medusa.training.answering import AnsweringEngine, AnswerOptions, find_target, fit_to_model
from vllm_medusa.training.calibrate import measure, reliability
from vllm_medusa.training.calibration_report import CalibrationReport
from vllm_medusa.training.data import record_answers
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.prompts import read_prompts, render_prompts
from vllm_medusa.training.replay import replay_guesses
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.topology import MAX_NODES

TREE_SIZES = (1, 2, 4, 8, 16, 32, 63)
STEP_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class CalibrateOptions:
    """Everything `calibrate` is asked for.

    Attributes:
        model: the target, a folder or hub id.
        heads: folder or hub id; its config.json is written.
        prompts: JSON lines with `prompt` or `turns`, none of which the heads learnt from.
        num_prompts: how many of them, the first ones.
        num_speculative_tokens: nodes to draft on this platform where a user names no number; None: what the heads'
            config said before.
        work: where the answers' rows are kept, to go on after a kill; None: nowhere.
        measure_cost: whether to time steps.
    """

    model: str
    heads: str
    prompts: Path
    num_prompts: int = 128
    num_speculative_tokens: int | None = None
    work: Path | None = None
    measure_cost: bool = True
    answers: AnswerOptions = field(default_factory=lambda: AnswerOptions(shard_size=64))


def run_calibration(options: CalibrateOptions, console: Console | None = None) -> CalibrationReport:
    """Calibrate heads and write the result into their config.json; nothing else of their folder changes.

    Raises:
        MedusaError: heads that do not fit the model, prompts that cannot serve, a folder that cannot be written.
    """
    console = console or Console(quiet=True)
    folder, model = locate_heads(options.heads), str(find_target(options.model, options.answers))
    heads = _bound(folder, model)
    options = replace(options, answers=fit_to_model(model, options.answers))
    if not os.access(folder / "config.json", os.W_OK):
        raise MedusaError.of("heads", str(folder), "its config.json cannot be written; copy the folder first")
    prompts = list(dict.fromkeys(read_prompts(options.prompts)))[: options.num_prompts]
    with _work(options, model, prompts) as work:
        rows, step_cost = _answer(model, prompts, work, options, console)
        with stage(console, "calibrating"):
            report = _report(heads, rows, folder, model, step_cost, options)
    save_calibration(folder, report.calibration, heads.config)
    return report


def _bound(folder: Path, model: str) -> MedusaHeads:
    """The heads in bfloat16, tied to their target."""
    target = read_target(model)
    heads = load_heads(folder)
    check_heads(heads.config, target.unembedding.shape[1], target.unembedding.shape[0])
    device = _platform()
    heads.to(device, torch.bfloat16)
    heads.bind(*target.to(device, torch.bfloat16).matrices)
    return heads


@contextmanager
def _work(options: CalibrateOptions, model: str, prompts: list[str]) -> Iterator[Path]:
    if options.work is not None:
        # One folder for each way of answering: rows of another model or other prompts are never mixed in.
        asked = json.dumps([str(Path(model).resolve()), prompts, options.answers.recipe()])
        yield options.work / hashlib.sha256(asked.encode()).hexdigest()[:16]
        return
    with tempfile.TemporaryDirectory(prefix="vllm-medusa-") as folder:
        yield Path(folder)


def _answer(
    model: str, prompts: list[str], work: Path, options: CalibrateOptions, console: Console
) -> tuple[HiddenRows, dict[int, float]]:
    """The rows of the target's greedy answers, and seconds by tokens in a step."""
    ids, answers = render_prompts(model, prompts), options.answers
    with AnsweringEngine(model, answers, console) as engine:
        with stage(console, "answering prompts") as now:
            now.update(done=0, total=len(prompts))
            shards = record_answers(ids, work, answers, engine, on_progress=lambda done, _: now.update(done=done))
        times: list[float] = []
        if options.measure_cost:
            with stage(console, "timing steps"):
                times = engine.llm.collective_rpc("time_steps", kwargs={"sizes": list(STEP_SIZES)})[0]
    return HiddenRows.open(shards), dict(zip(STEP_SIZES, times, strict=False))


def _report(
    heads: MedusaHeads, rows: HiddenRows, folder: Path, model: str, cost: dict[int, float], options: CalibrateOptions
) -> CalibrationReport:
    found = measure(heads, rows)
    calibration = _with_nodes(found.calibration, heads.config.calibration, options.num_speculative_tokens)
    accuracy = calibration.rank_accuracy
    if not any(accuracy[0]):
        fix = "its first head is never right on this model's answers: heads for another model? Nothing was written"
        raise MedusaError.of("heads", str(folder), fix)
    largest = grow_static(accuracy, MAX_NODES)
    nodes = min(calibration.num_speculative_tokens[_platform()], largest.num_nodes)
    promised = (1.0 + np.cumsum(largest.reach(accuracy))).tolist()
    return CalibrationReport(
        heads=folder,
        model=model,
        calibration=calibration,
        before=reliability(found.before),
        after=reliability(found.after),
        tree=largest.prefix(nodes),
        expected=dict(enumerate(promised, start=1)),
        accepted=replay_guesses(found.after, rows, accuracy, static_sizes=TREE_SIZES, dynamic_sizes=TREE_SIZES),
        step_cost=cost,
    )


def _with_nodes(new: Calibration, old: Calibration | None, asked: int | None) -> Calibration:
    """Numbers of nodes stay as they were, but for what the user asks for on this platform."""
    kept = old.num_speculative_tokens if old is not None else {}
    chosen = {} if asked is None else {_platform(): asked}
    return new.model_copy(update={"num_speculative_tokens": {**new.num_speculative_tokens, **kept, **chosen}})


def _platform() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
