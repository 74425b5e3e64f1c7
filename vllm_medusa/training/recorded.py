"""The target's answers to all prompts of a run, split into rows to learn from and rows to calibrate on."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.bars import bar
from vllm_medusa.training.data import AnsweringEngine, read_facts, record_answers
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.prompts import read_prompts, read_texts, render_prompts, render_texts

RECIPE = "recipe.json"


@dataclass(frozen=True)
class Recorded:
    """Rows to learn from, rows to calibrate on, and facts about the former for the card."""

    rows: HiddenRows
    held: HiddenRows
    facts: dict[str, Any]


def record(options: TrainOptions, console: Console) -> Recorded:
    """Have the target answer what it has not answered yet, held-out prompts first."""
    source, prompts = _questions(options)
    if len(prompts) <= options.held_out:
        fix = f"holds {len(prompts)} different prompts and {options.held_out} are held out; give more or hold out fewer"
        raise MedusaError.of("prompts", str(source), fix)
    folder, answers = options.rows_folder, options.answers
    _check_recipe(folder, options, prompts)
    if options.texts is None:
        ids = render_prompts(options.model, prompts)
    else:
        ids = render_texts(options.model, prompts, options.text_tokens)
    held, rest = ids[: options.held_out], ids[options.held_out :]
    with AnsweringEngine(options.model, answers) as engine, bar(console, "answering") as (bars, task):
        held_shards = record_answers(held, folder / "heldout", replace(answers, temperatures=(0.0,)), engine)
        shards = record_answers(
            rest,
            folder / "answers",
            answers,
            engine,
            max_tokens=options.max_tokens,
            on_progress=lambda _, tokens: bars.update(
                task, completed=min(tokens, options.max_tokens), total=options.max_tokens
            ),
        )
    done = [read_facts(shard) for shard in shards]
    tokens = {
        f"at temperature {t:g}": sum(d["tokens"] for d in done if d["temperature"] == t) for t in answers.temperatures
    }
    rows, held_rows = HiddenRows.open(shards), HiddenRows.open(held_shards)
    return Recorded(
        rows,
        held_rows,
        {
            "training_prompts": min(sum(facts["prompts"] for facts in done), len(rest)),
            "training_tokens": len(rows),
            "training_tokens_by_temperature": tokens,
            "held_out_prompts": int(held_rows.sequences[-1]) + 1,
            "max_new_tokens": answers.max_new_tokens,
            "answering_seconds": round(sum(facts["seconds"] for facts in done)),
        },
    )


def _questions(options: TrainOptions) -> tuple[Path, list[str]]:
    """The file asked from and its different prompts or texts, so that none is ever on both sides of the split."""
    if options.texts is not None and options.prompts is None:
        return options.texts, list(dict.fromkeys(read_texts(options.texts)))
    if options.prompts is None or options.texts is not None:
        raise MedusaError.of("prompts", options.prompts, "give either prompts or texts, not both and not neither")
    return options.prompts, list(dict.fromkeys(read_prompts(options.prompts)))


def _check_recipe(folder: Path, options: TrainOptions, prompts: list[str]) -> None:
    """Rows of an earlier run serve only if target, prompts and the way of answering are the same.

    Temperatures are not part of that: each shard says its own, and more of them may be added later.
    """
    recipe = {
        "model": str(Path(options.model).resolve()),
        "prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        "held_out": options.held_out,
        "text_tokens": options.text_tokens if options.texts is not None else None,
        **{name: value for name, value in asdict(options.answers).items() if name != "temperatures"},
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
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(recipe, indent=2) + "\n")
    partial.replace(file)
