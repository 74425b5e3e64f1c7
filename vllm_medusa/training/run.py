"""From prompts to heads: the target answers, its hidden rows are kept, heads learn from them and are calibrated."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.target import read_target
from vllm_medusa.training.calibrate import calibrate
from vllm_medusa.training.card import model_card
from vllm_medusa.training.data import AnsweringEngine, AnswerOptions, read_prompts, record_answers
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import LoopOptions, choose_draft_vocab, train_heads
from vllm_medusa.training.replay import replay

RECIPE = "recipe.json"


@dataclass(frozen=True)
class TrainOptions:
    """Everything `train` is asked for.

    Attributes:
        model: folder of the target.
        prompts: JSON lines with `prompt` or `turns`; the first `held_out` prompts are kept for calibration.
        out: folder of the heads, written at the end.
        work: where recorded rows are kept, so that a killed run goes on; None: beside `out`, as NAME-rows.
        base_model: the target's public name, for the card; None: the folder's name.
        max_tokens: answer tokens to learn from; fewer if the prompts end before.
        draft_vocab_size: tokens the heads can guess, the most frequent ones of the answers; None: all.
    """

    model: str
    prompts: Path
    out: Path
    work: Path | None = None
    base_model: str | None = None
    held_out: int = 128
    max_tokens: int = 640_000
    num_heads: int = 4
    num_layers: int = 2
    root_conditioned: bool = True
    draft_vocab_size: int | None = 8192
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)

    @property
    def rows_folder(self) -> Path:
        """Where recorded rows lie."""
        return self.work or self.out.with_name(self.out.name + "-rows")


def train(options: TrainOptions, console: Console | None = None) -> Path:
    """Make heads for a target: answers → hidden rows → training → calibration → a folder with a model card.

    Restartable: finished shards of answers are used again, by this run or a later one with other training settings.

    Args:
        options: see TrainOptions.
        console: where bars and figures are shown; None: nowhere.

    Returns:
        `options.out`.

    Raises:
        MedusaError: prompts, a model or a work folder that cannot serve.
    """
    console = console or Console(quiet=True)
    unembedding, embedding = read_target(options.model)
    train_rows, held_rows, prompts_used = _record(options, console)
    heads = new_heads(options, train_rows, unembedding, embedding)
    began = time.monotonic()
    with _bar(console, "training") as (bars, task):
        learnt = train_heads(
            heads,
            train_rows,
            options.loop,
            lambda now: bars.update(
                task,
                completed=now.step,
                total=now.steps,
                description=f"training, loss {' '.join(f'{loss:.2f}' for loss in now.losses)}",
            ),
        )
    facts: dict[str, Any] = {
        "training_prompts": prompts_used,
        "training_tokens": len(train_rows),
        "held_out_prompts": int(held_rows.sequences[-1]) + 1,
        **{name: value for name, value in asdict(options.loop).items()},
        "max_new_tokens": options.answers.max_new_tokens,
        "training_seconds": round(time.monotonic() - began),
        "threads": torch.get_num_threads(),
        "final_losses": [round(loss, 4) for loss in learnt.losses],
    }
    if heads.token_map is not None:
        known = np.isin(held_rows.tokens, heads.token_map.cpu().numpy())
        facts["draft_vocab_coverage"] = round(float(known.mean()), 5)
    with console.status("calibrating"):
        finish(heads, held_rows, {"held-out prompts": held_rows}, facts, options.out)
    console.print(f"heads written to {options.out}")
    return options.out


def new_heads(
    options: TrainOptions, rows: HiddenRows, unembedding: torch.Tensor, embedding: torch.Tensor
) -> MedusaHeads:
    """Untrained float32 heads in the shape asked for, bound to the target, draft vocabulary chosen from `rows`."""
    vocab_size, hidden_size = unembedding.shape
    config = HeadsConfig(
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        root_conditioned=options.root_conditioned,
        draft_vocab_size=options.draft_vocab_size,
        base_model=options.base_model or Path(options.model).name,
    )
    heads = MedusaHeads(config)
    if heads.token_map is not None:
        heads.token_map.copy_(choose_draft_vocab(rows.tokens, config.num_outputs, vocab_size))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads.to(device).bind(unembedding.to(device, torch.bfloat16), embedding.to(device, torch.bfloat16))
    return heads


def finish(
    heads: MedusaHeads, held_rows: HiddenRows, replayed: dict[str, HiddenRows], facts: dict[str, Any], out: Path
) -> HeadsConfig:
    """Calibrate trained heads in bfloat16, replay answers, write heads and card to `out`; returns the full config."""
    heads = heads.to(torch.bfloat16).eval()
    calibration = calibrate(heads, held_rows)
    lengths = {
        name: replay(heads, rows, temperatures=calibration.temperatures, accuracy=calibration.rank_accuracy)
        for name, rows in replayed.items()
    }
    training = {**facts, "accepted_length": lengths}
    heads.config = heads.config.model_copy(update={"calibration": calibration, "training": training})
    save_heads(heads, out)
    (out / "README.md").write_text(model_card(heads.config), encoding="utf-8")
    return heads.config


def _record(options: TrainOptions, console: Console) -> tuple[HiddenRows, HiddenRows, int]:
    """Rows to learn from, rows to calibrate on, and the number of prompts answered for the former."""
    prompts = list(dict.fromkeys(read_prompts(options.prompts)))  # one prompt is never on both sides
    if len(prompts) <= options.held_out:
        fix = f"holds {len(prompts)} different prompts and {options.held_out} are held out; give more or hold out fewer"
        raise MedusaError.of("prompts", str(options.prompts), fix)
    folder = options.rows_folder
    _check_recipe(folder, options, prompts)
    held, rest = prompts[: options.held_out], prompts[options.held_out :]
    with AnsweringEngine(options.model, options.answers) as engine, _bar(console, "answering") as (bars, task):
        held_shards = record_answers(options.model, held, folder / "heldout", options.answers, engine=engine)
        shards = record_answers(
            options.model,
            rest,
            folder / "answers",
            options.answers,
            max_tokens=options.max_tokens,
            on_progress=lambda _, tokens: bars.update(
                task, completed=min(tokens, options.max_tokens), total=options.max_tokens
            ),
            engine=engine,
        )
    answered = sum(int(json.loads((shard / "done.json").read_text())["prompts"]) for shard in shards)
    return HiddenRows.open(shards), HiddenRows.open(held_shards), answered


def _check_recipe(folder: Path, options: TrainOptions, prompts: list[str]) -> None:
    """Rows of an earlier run serve only if target, prompts and the way of answering are the same."""
    recipe = {
        "model": str(Path(options.model).resolve()),
        "prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        "held_out": options.held_out,
        **asdict(options.answers),
    }
    file = folder / RECIPE
    if file.exists():
        made = json.loads(file.read_text())
        for key, value in recipe.items():
            if made.get(key) != value:
                fix = f"{folder} holds rows made with {made.get(key)!r}; name another work folder or delete it"
                raise MedusaError.of(key, value, fix)
        return
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe, indent=2) + "\n")


@contextmanager
def _bar(console: Console, name: str) -> Iterator[tuple[Progress, Any]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        yield bars, bars.add_task(name, total=None)
