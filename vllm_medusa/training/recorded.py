"""The target's answers to all prompts of a run, split into rows to learn from and rows to calibrate on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from vllm_medusa.errors import MedusaError
from vllm_medusa.progress import stage
from vllm_medusa.training.answering import AnsweringEngine, leaves_room
from vllm_medusa.training.conversation import Conversation
from vllm_medusa.training.data import Follow, read_facts, record_answers
from vllm_medusa.training.hidden import HIDDEN, HiddenRows
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.prompts import (
    open_chat,
    read_conversations,
    read_prompts,
    read_texts,
    render_prompts,
    render_texts,
)
from vllm_medusa.training.self_prompts import invent_prompts
from vllm_medusa.training.sizes import in_words

RECIPE = "recipe.json"


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


class Recording:
    """All that the target answers for one run. vLLM starts when there is something left to answer, and ends on exit."""

    def __init__(
        self,
        options: TrainOptions,
        console: Console,
        hidden_size: int,
        look: Callable[[Path], None] = lambda held_out_shard: None,
    ) -> None:
        """Read what is asked, and say what its rows will take.

        Args:
            options: see TrainOptions.
            console: where bars are shown.
            hidden_size: of the target's rows.
            look: shown the first finished store, before hours of answering; may raise.

        Raises:
            MedusaError: prompts that cannot serve, a work folder of another run.
        """
        self._options, self._console, self._look = options, console, look
        self.folder = options.rows_folder
        self._source, self._given = _questions(options)
        _check_recipe(self.folder, options, self._given)
        has_teacher, most = options.loop.loss != "ce", options.keep_rows or options.max_tokens
        console.print(in_words(self.folder, min(most, options.max_tokens), hidden_size, has_teacher=has_teacher))
        self._engine = AnsweringEngine(options.model, options.answers, console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._engine.__exit__(*ended)

    def begin(self) -> None:
        """Everything but the answers that heads learn from: prompts are invented, held-out ones answered first."""
        options, console, folder = self._options, self._console, self.folder
        prompts = self._given
        if options.self_prompts:
            with stage(console, "inventing prompts") as now:
                invented = invent_prompts(
                    options.model,
                    options.self_prompts,
                    folder / "prompts",
                    options.answers,
                    self._engine,
                    lambda done, wanted: now.update(done=done, total=wanted),
                )
            prompts = list(dict.fromkeys([*prompts, *map(Conversation.of, invented)]))
        tests = {file.stem: read_prompts(file)[: options.evaluate_prompts] for file in options.evaluate}
        unseen = {prompt for chosen in tests.values() for prompt in chosen}
        self._prompts = prompts = [prompt for prompt in prompts if _opening(prompt) not in unseen]
        if len(prompts) <= options.held_out:
            fix = f"gives {len(prompts)} different prompts and {options.held_out} are held out; hold out fewer"
            raise MedusaError.of("prompts", self._source, fix)
        ids, self._follow = _rendered(options, prompts)
        self._held, self._rest = ids[: options.held_out], ids[options.held_out :]
        greedy = replace(options.answers, temperatures=(0.0,))
        with stage(console, "answering held-out prompts"):
            self._held_shards = record_answers(
                self._held, folder / "heldout", greedy, self._engine, follow=self._follow
            )
        self._look(self._held_shards[0])
        short = replace(greedy, max_new_tokens=options.evaluate_tokens)
        self._evaluated = {}
        for name, chosen in tests.items():
            with stage(console, f"answering {name}"):
                asked_of = render_prompts(options.model, chosen)
                shards = folder / f"{name}-{options.evaluate_prompts}"
                self._evaluated[name] = record_answers(asked_of, shards, short, self._engine)

    def answer(
        self, max_tokens: int, on_progress: Callable[[int, int], None] = lambda prompts, tokens: None
    ) -> list[Path]:
        """The first stores to learn from, as many as hold `max_tokens` tokens, or all that the prompts bring."""
        return record_answers(
            self._rest,
            self.folder / "answers",
            self._options.answers,
            self._engine,
            follow=lambda number, said: self._follow(number + self._options.held_out, said),
            max_tokens=max_tokens,
            on_progress=on_progress,
        )

    @property
    def held_out(self) -> HiddenRows:
        """Rows of the answers to held-out prompts."""
        return HiddenRows.open(self._held_shards)

    @property
    def num_prompts(self) -> int:
        """Prompts to learn from that leave room for an answer, each as often as there are temperatures."""
        fitting = sum(leaves_room(row, self._options.answers) for row in self._rest)
        return fitting * len(self._options.answers.temperatures)

    def complete(self, shards: list[Path], rows: HiddenRows) -> Recorded:
        """What was recorded, with `rows` of these stores to learn from."""
        answers, held_out = self._options.answers, self._options.held_out
        done = [read_facts(shard) for shard in shards]
        tokens = {
            f"at temperature {t:g}": sum(d["tokens"] for d in done if d["temperature"] == t)
            for t in answers.temperatures
        }
        pairs = zip(self._prompts[held_out:], self._rest, strict=True)
        fitting = [prompt for prompt, row in pairs if leaves_room(row, answers)]
        asked = fitting[: sum(facts["prompts"] for facts in done)]
        return Recorded(
            rows,
            self.held_out,
            self._held,
            {name: HiddenRows.open(stores) for name, stores in self._evaluated.items()},
            {
                "training_prompts": len(asked),
                "self_prompts": len(set(asked).difference(self._given)),
                "training_tokens": sum(facts["tokens"] for facts in done),
                "training_tokens_by_temperature": tokens,
                "held_out_prompts": sum(facts["prompts"] for facts in map(read_facts, self._held_shards)),
                "max_new_tokens": answers.longest_answer,
                "answering_seconds": round(sum(facts["seconds"] for facts in done)),
            },
        )


def record(
    options: TrainOptions,
    console: Console,
    hidden_size: int,
    look: Callable[[Path], None] = lambda held_out_shard: None,
) -> Recorded:
    """Have the target answer all that it has not answered yet. Arguments as of `Recording`."""
    with Recording(options, console, hidden_size, look) as recording:
        recording.begin()
        with stage(console, "answering, in tokens") as now:
            now.update(done=0, total=options.max_tokens)
            shards = recording.answer(
                options.max_tokens, lambda _, tokens: now.update(done=min(tokens, options.max_tokens))
            )
        for shard in shards:
            check_rows(shard)
    return recording.complete(shards, HiddenRows.open(shards))


def check_rows(shard: Path) -> None:
    """Whether a finished store still has its rows.

    Raises:
        MedusaError: they were learnt from and deleted.
    """
    if not (shard / HIDDEN).exists():
        fix = "its rows were learnt from and deleted (--keep-rows); name another work folder"
        raise MedusaError.of("work", str(shard.parent.parent), fix)


def _questions(options: TrainOptions) -> tuple[str, list[Conversation]]:
    """The file asked from and its different prompts or texts, so that none is ever on both sides of the split."""
    if options.texts is not None and options.prompts is None and not options.self_prompts:
        return str(options.texts), [Conversation.of(text) for text in dict.fromkeys(read_texts(options.texts))]
    if options.texts is not None or (options.prompts is None and not options.self_prompts):
        fix = "give prompts, a number of self_prompts or both; or texts and neither of these"
        raise MedusaError.of("prompts", options.prompts, fix)
    if options.prompts is None:
        return "self_prompts", []
    return str(options.prompts), list(dict.fromkeys(read_conversations(options.prompts)))


def _opening(prompt: Conversation) -> str:
    """A user's first words."""
    return next((str(m.get("content")) for m in json.loads(prompt.parts[0]) if m["role"] == "user"), "")


def _rendered(options: TrainOptions, prompts: list[Conversation]) -> tuple[list[list[int]], Follow]:
    """Token ids of each first turn, and what gives those of later ones."""
    if options.texts is not None:
        texts = [prompt.key for prompt in prompts]
        return render_texts(options.model, texts, options.text_tokens), lambda number, said: None
    chat = open_chat(options.model)
    return [chat.ask(prompt) or [] for prompt in prompts], lambda number, said: chat.ask(prompts[number], said)


def _check_recipe(folder: Path, options: TrainOptions, prompts: list[Conversation]) -> None:
    """Rows of an earlier run serve only if target, prompts and the way of answering are the same.

    What changes only when answers come is not part of that (`AnswerOptions.recipe`).
    """
    recipe = {
        "model": str(Path(options.model).resolve()),
        "prompts": hashlib.sha256("\0".join(prompt.key for prompt in prompts).encode()).hexdigest(),
        "held_out": options.held_out,
        "self_prompts": options.self_prompts,
        "text_tokens": options.text_tokens if options.texts is not None else None,
        **options.answers.recipe(),
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
