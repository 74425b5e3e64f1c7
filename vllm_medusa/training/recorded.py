"""The target's answers to all prompts of a run, split into rows to learn from and rows to calibrate on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.progress import stage
from vllm_medusa.training.data import AnsweringEngine, leaves_room, read_facts, record_answers
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.prompts import read_prompts, read_texts, render_prompts, render_texts
from vllm_medusa.training.self_prompts import invent_prompts

RECIPE = "recipe.json"
_MAY_DIFFER = ("temperatures", "enforce_eager")


@dataclass(frozen=True)
class Recorded:
    """Rows to learn from, rows to calibrate on, rows to replay by name, and facts about the first for the card.

    `held_prompts` are the token ids that `held` answers, in the same order.
    """

    rows: HiddenRows
    held: HiddenRows
    held_prompts: list[list[int]]
    evaluated: dict[str, HiddenRows]
    facts: dict[str, Any]


def record(
    options: TrainOptions, console: Console, look: Callable[[Path], None] = lambda held_out_shard: None
) -> Recorded:
    """Have the target answer what it has not answered yet, held-out prompts first.

    Args:
        options: see TrainOptions.
        console: where bars are shown.
        look: shown the first finished store, before hours of answering; may raise.
    """
    source, given = _questions(options)
    folder, answers = options.rows_folder, options.answers
    _check_recipe(folder, options, given)
    with AnsweringEngine(options.model, answers, console) as engine:
        prompts = given
        if options.self_prompts:
            with stage(console, "inventing prompts") as now:
                invented = invent_prompts(
                    options.model,
                    options.self_prompts,
                    folder / "prompts",
                    answers,
                    engine,
                    lambda done, wanted: now.update(done=done, total=wanted),
                )
            prompts = list(dict.fromkeys([*given, *invented]))
        tests = {file.stem: read_prompts(file)[: options.evaluate_prompts] for file in options.evaluate}
        unseen = {prompt for chosen in tests.values() for prompt in chosen}
        prompts = [prompt for prompt in prompts if prompt not in unseen]
        own = set(prompts).difference(given)
        if len(prompts) <= options.held_out:
            fix = f"gives {len(prompts)} different prompts and {options.held_out} are held out; hold out fewer"
            raise MedusaError.of("prompts", source, fix)
        if options.texts is None:
            ids = render_prompts(options.model, prompts)
        else:
            ids = render_texts(options.model, prompts, options.text_tokens)
        held, rest = ids[: options.held_out], ids[options.held_out :]
        greedy = replace(answers, temperatures=(0.0,))
        with stage(console, "answering held-out prompts"):
            held_shards = record_answers(held, folder / "heldout", greedy, engine)
        look(held_shards[0])
        short = replace(greedy, max_new_tokens=options.evaluate_tokens)
        evaluated = {}
        for name, chosen in tests.items():
            with stage(console, f"answering {name}"):
                asked_of = render_prompts(options.model, chosen)
                evaluated[name] = record_answers(asked_of, folder / f"{name}-{options.evaluate_prompts}", short, engine)
        with stage(console, "answering, in tokens") as now:
            now.update(done=0, total=options.max_tokens)
            shards = record_answers(
                rest,
                folder / "answers",
                answers,
                engine,
                max_tokens=options.max_tokens,
                on_progress=lambda _, tokens: now.update(done=min(tokens, options.max_tokens)),
            )
    done = [read_facts(shard) for shard in shards]
    tokens = {
        f"at temperature {t:g}": sum(d["tokens"] for d in done if d["temperature"] == t) for t in answers.temperatures
    }
    fitting = [
        prompt for prompt, row in zip(prompts[options.held_out :], rest, strict=True) if leaves_room(row, answers)
    ]
    asked = fitting[: sum(facts["prompts"] for facts in done)]
    rows, held_rows = HiddenRows.open(shards), HiddenRows.open(held_shards)
    return Recorded(
        rows,
        held_rows,
        held,
        {name: HiddenRows.open(stores) for name, stores in evaluated.items()},
        {
            "training_prompts": len(asked),
            "self_prompts": len(own.intersection(asked)),
            "training_tokens": len(rows),
            "training_tokens_by_temperature": tokens,
            "held_out_prompts": int(held_rows.sequences[-1]) + 1,
            "max_new_tokens": answers.max_new_tokens,
            "answering_seconds": round(sum(facts["seconds"] for facts in done)),
        },
    )


def _questions(options: TrainOptions) -> tuple[str, list[str]]:
    """The file asked from and its different prompts or texts, so that none is ever on both sides of the split."""
    if options.texts is not None and options.prompts is None and not options.self_prompts:
        return str(options.texts), list(dict.fromkeys(read_texts(options.texts)))
    if options.texts is not None or (options.prompts is None and not options.self_prompts):
        fix = "give prompts, a number of self_prompts or both; or texts and neither of these"
        raise MedusaError.of("prompts", options.prompts, fix)
    if options.prompts is None:
        return "self_prompts", []
    return str(options.prompts), list(dict.fromkeys(read_prompts(options.prompts)))


def _check_recipe(folder: Path, options: TrainOptions, prompts: list[str]) -> None:
    """Rows of an earlier run serve only if target, prompts and the way of answering are the same.

    Temperatures are not part of that: each shard says its own, and more of them may be added later. Nor is whether the
    target was compiled.
    """
    recipe = {
        "model": str(Path(options.model).resolve()),
        "prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        "held_out": options.held_out,
        "self_prompts": options.self_prompts,
        "text_tokens": options.text_tokens if options.texts is not None else None,
        **{name: value for name, value in asdict(options.answers).items() if name not in _MAY_DIFFER},
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
