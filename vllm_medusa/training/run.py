"""From prompts to heads: the target answers, its hidden rows are kept, heads learn from them and are calibrated."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.source import is_hub_id
from vllm_medusa.heads.target import Target, read_target
from vllm_medusa.progress import Stage, stage
from vllm_medusa.quota import usable_cores
from vllm_medusa.training.answering import find_target, fit_to_model
from vllm_medusa.training.calibrate import calibrate, guess
from vllm_medusa.training.card import model_card
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import choose_draft_vocab, train_heads
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.ranks import Ranks, alone, launched, together
from vllm_medusa.training.recorded import Recorded, Recording, record
from vllm_medusa.training.replay import replay_by_place, replay_guesses
from vllm_medusa.training.said import check_target
from vllm_medusa.training.served import compare_served
from vllm_medusa.training.sharing import open_repository, push
from vllm_medusa.training.snapshot import Snapshots, run_name
from vllm_medusa.training.step import Progress, start_trunk
from vllm_medusa.training.teacher import make_teacher
from vllm_medusa.training.windows import learn_in_windows, shard_for

TOP_K = 10  # candidates that each head offers to trees


def train(options: TrainOptions, console: Console | None = None) -> Path:
    """Make heads for a target: answers → hidden rows → training → calibration → a folder with a model card.

    Killed at any point it goes on from there when started again: finished shards of answers are used again (by runs
    with other training settings too), and training goes on from its last snapshot, to the same weights, bit for bit.

    Args:
        options: see TrainOptions.
        console: where bars and figures are shown; None: nowhere.

    Returns:
        `options.out`.

    Raises:
        MedusaError: prompts, a model or a work folder that cannot serve.
    """
    ranks = launched()
    if options.push_to_hub is not None and ranks.is_first:
        open_repository(options.push_to_hub, options.answers.engine.get("hf_token"))
    console = (console if ranks.is_first else None) or Console(quiet=True)
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    folder = find_target(options.model, options.answers)
    name = options.base_model or (options.model if is_hub_id(options.model) else folder.name)
    options = replace(options, model=str(folder), base_model=name, answers=fit_to_model(str(folder), options.answers))
    target = read_target(folder)
    config = heads_config(options, target)  # before an hour of answering
    if options.keep_rows is not None:
        options = _for_windows(options, options.keep_rows, ranks)
        _in_windows(options, config, target, console)
        return options.out
    recorded = None
    if ranks.is_first:
        # The tokens that came are the target's whatever its head does; its distributions are asked of what we read.
        learnt = target.to("cpu", torch.bfloat16)
        look = partial(check_target, learnt, model=options.base_model) if options.loop.loss != "ce" else _trust
        with alone():
            recorded = record(options, console, config.hidden_size, look)
    with together(ranks):
        ranks.wait()  # the first one has answered
        recorded = recorded or record(options, console, config.hidden_size)
        target = target.to(_device(), torch.bfloat16)
        heads = new_heads(config, recorded.rows, target, options.loop.seed)
        facts, snapshots = learn(heads, recorded.rows, target, options, console, ranks)
        ranks.wait()
    if ranks.is_first:
        with alone():
            _complete(heads, recorded, facts, options, console)
        snapshots.remove()
        console.print(f"heads written to {options.out}")
    return options.out


def _for_windows(options: TrainOptions, keep_rows: int, ranks: Ranks) -> TrainOptions:
    """The same options, with shards of which some fit.

    Raises:
        MedusaError: settings that cannot be met when rows are kept for a while only.
    """
    if options.loop.epochs != 1:
        fix = "kept rows are learnt from once; say --epochs 1, or leave --keep-rows out"
        raise MedusaError.of("epochs", options.loop.epochs, fix)
    if ranks.count > 1:
        raise MedusaError.of("keep_rows", keep_rows, "one process trains when rows are not kept; leave torchrun out")
    return replace(options, answers=shard_for(keep_rows, options.answers))


def _in_windows(options: TrainOptions, config: HeadsConfig, target: Target, console: Console) -> None:
    """Answer and learn by turns, with `keep_rows` rows on disk at most."""
    assert options.keep_rows is not None
    learnt = target.to(_device(), torch.bfloat16)
    look = partial(check_target, learnt, model=options.base_model) if options.loop.loss != "ce" else _trust
    settings, kind = asdict(options.loop), config.model_dump(mode="json")

    def snapshots_of(tokens: npt.NDArray[np.int32]) -> Snapshots:
        name = run_name(settings, kind, options.keep_rows, options.max_tokens, tokens.tobytes())
        return Snapshots(options.rows_folder / f"run-{name}.pt")

    with Recording(options, console, config.hidden_size, look) as recording:
        recording.begin()
        with stage(console, "answering and training by turns") as now:
            heads, progress, shards, rows, snapshots = learn_in_windows(
                recording,
                lambda rows, tokens: new_heads(config, rows, learnt, options.loop.seed, tokens),
                snapshots_of,
                learnt,
                options.loop,
                options.keep_rows,
                options.max_tokens,
                lambda state: _tell(now, state.step, state.steps, state.losses),
            )
        recorded = recording.complete(shards, rows)
    _complete(heads, recorded, {**_facts(options, progress), "kept_rows": options.keep_rows}, options, console)
    snapshots.remove()
    console.print(f"heads written to {options.out}")


def _complete(
    heads: MedusaHeads, recorded: Recorded, facts: dict[str, Any], options: TrainOptions, console: Console
) -> None:
    """Calibrate, replay and write trained heads, and hold what they bring in vLLM against it."""
    facts = {**recorded.facts, **facts}
    if heads.token_map is not None:
        known = np.isin(recorded.held.tokens, heads.token_map.cpu().numpy())
        facts["draft_vocab_coverage"] = round(float(known.mean()), 5)
    with stage(console, "calibrating"):
        notes = options.notes.read_text(encoding="utf-8") if options.notes is not None else ""
        replayed = {"held-out prompts": recorded.held, **recorded.evaluated}
        finish(heads, recorded.held, replayed, facts, options.out, notes)
    if options.compare_served:
        held, prompts = recorded.held, recorded.held_prompts
        served = compare_served(str(options.model), heads, options.out, prompts, held, options.answers, console)
        _write(heads, {**(heads.config.training or {}), "served": served}, options.out, notes)
    if options.push_to_hub is not None:
        with stage(console, f"putting them into {options.push_to_hub}"):
            console.print(push(options.out, options.push_to_hub, options.answers.engine.get("hf_token")))


def learn(
    heads: MedusaHeads,
    rows: HiddenRows,
    target: Target,
    options: TrainOptions,
    console: Console,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> tuple[dict[str, Any], Snapshots]:
    """Train new heads on recorded rows, or go on where a killed run stopped.

    Args:
        heads: as `new_heads` makes them.
        rows: what they learn from.
        target: the target's own head, which is asked for its distributions.
        options: see TrainOptions.
        console: where bars are shown.
        ranks: the processes that learn together.

    Returns:
        Facts for the card, and the run's snapshots, to be removed when the heads are safe.
    """
    settings, kind = asdict(options.loop), heads.config.model_dump(mode="json")
    token_map = b"" if heads.token_map is None else heads.token_map.cpu().numpy().tobytes()
    name = run_name(settings, kind, np.ascontiguousarray(rows.tokens).tobytes(), token_map)
    snapshots = Snapshots(options.rows_folder / f"run-{name}.pt")
    teacher = None
    if options.loop.loss != "ce":
        with stage(console, "asking the target for its distributions") as now:
            teacher = make_teacher(
                target,
                heads.token_map,
                rows,
                options.rows_folder,
                lambda done, total: now.update(done=done, total=total),
                ranks,
            )
    with stage(console, "training") as now:
        learnt = train_heads(
            heads,
            rows,
            options.loop,
            lambda state: _tell(now, state.step, state.steps, state.losses),
            teacher=teacher,
            snapshots=snapshots,
            ranks=ranks,
            tell=console.print,
        )
    processes = {"processes": ranks.count} if ranks.count > 1 else {}
    return {**_facts(options, learnt), **processes}, snapshots


def _facts(options: TrainOptions, learnt: Progress) -> dict[str, Any]:
    return {
        **asdict(options.loop),
        "training_seconds": round(learnt.seconds),
        "threads": torch.get_num_threads(),
        "final_losses": [round(loss, 4) for loss in learnt.losses],
    }


def _tell(now: Stage, step: int, steps: int, losses: Sequence[float]) -> None:
    now.name = f"training, loss {' '.join(f'{loss:.2f}' for loss in losses)}"
    now.update(done=step, total=steps)


def heads_config(options: TrainOptions, target: Target) -> HeadsConfig:
    """The shape asked for, on this target; a draft vocabulary that is no smaller than its own is none.

    Raises:
        MedusaError: a shape that cannot be.
    """
    vocab_size, hidden_size = target.unembedding.shape
    size = options.draft_vocab_size
    reduced = size if size is not None and size < vocab_size else None
    shape: dict[str, Any] = {
        "num_heads": options.num_heads,
        "num_layers": options.blocks,
        "root_conditioned": options.root_conditioned,
        "trunk_size": options.trunk,
        "unembedding": options.unembedding,
        "draft_vocab_size": reduced,
        "logit_scale": target.scale,
    }
    top_k = min(TOP_K, reduced or vocab_size)
    try:
        return HeadsConfig(
            hidden_size=hidden_size, vocab_size=vocab_size, top_k=top_k, base_model=options.base_model, **shape
        )
    except ValidationError as error:
        raise MedusaError.of("heads", shape, error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def new_heads(
    config: HeadsConfig, rows: HiddenRows, target: Target, seed: int, tokens: npt.NDArray[np.int32] | None = None
) -> MedusaHeads:
    """Untrained float32 heads, bound to the target, draft vocabulary chosen from `tokens`, or those of `rows`.

    An unembedding of their own begins as the target's.
    """
    heads = MedusaHeads(config)
    said = rows.tokens if tokens is None else tokens
    if heads.token_map is not None:
        heads.token_map.copy_(choose_draft_vocab(said, config.num_outputs, config.vocab_size))
    if heads.unembedding is not None:
        heads.unembedding.data.copy_(target.outputs(heads.token_map).unembedding)
    heads.to(target.unembedding.device).bind(*target.matrices)
    start_trunk(heads, rows, seed)
    return heads


def _trust(shard: Path) -> None:
    """Whatever it holds."""


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def finish(
    heads: MedusaHeads,
    held_rows: HiddenRows,
    replayed: dict[str, HiddenRows],
    facts: dict[str, Any],
    out: Path,
    notes: str = "",
) -> HeadsConfig:
    """Calibrate trained heads in bfloat16, replay answers, write heads and card to `out`; returns the full config."""
    heads = heads.to(torch.bfloat16).eval()
    calibration = calibrate(heads, held_rows)
    lengths, places = {}, {}
    for name, rows in replayed.items():
        guesses = guess(heads, rows, heads.config.top_k, calibration.temperatures)
        lengths[name] = replay_guesses(guesses, rows, calibration.rank_accuracy)
        places[name] = replay_by_place(guesses, rows)
    facts = {**facts, "accepted_length": lengths, "accepted_length_by_place": places}
    heads.config = heads.config.model_copy(update={"calibration": calibration})
    _write(heads, facts, out, notes)
    return heads.config


def _write(heads: MedusaHeads, training: dict[str, Any], out: Path, notes: str) -> None:
    """Heads and card, with these facts."""
    heads.config = heads.config.model_copy(update={"training": training})
    save_heads(heads, out)
    (out / "README.md").write_text(model_card(heads.config, notes), encoding="utf-8")
