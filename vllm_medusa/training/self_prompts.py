"""Prompts that the target invents itself: it is shown the beginning of a user's turn and goes on.

Chat models have learnt what users ask, so this gives prompts of all kinds without any data set (Magpie, Xu et al.
2024, arXiv:2406.08464), in the proportions that the target was made for. Prompts come in parts of a fixed size; a
finished part is a file and is never made again.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.answering import AnsweringEngine, AnswerOptions

PART = 1024  # samples drawn per part
TEMPERATURE, TOP_K = 1.0, 50
LONGEST = 96  # tokens of a prompt; a turn that has not ended by then is dropped
SHORTEST = 12  # characters
_MARK = "\x02"


def invent_prompts(
    model: str,
    count: int,
    folder: Path,
    options: AnswerOptions,
    engine: AnsweringEngine,
    on_progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> list[str]:
    """`count` different prompts, the same for the same seed.

    Args:
        model: folder of the target, whose tokenizer has a chat template.
        count: prompts wanted.
        folder: where finished parts lie.
        options: `seed` decides what is drawn.
        engine: asked only for parts that are not there.
        on_progress: told after every part.

    Raises:
        MedusaError: no chat template; a target that invents hardly anything new.
    """
    found: dict[str, None] = {}
    number = 0
    while len(found) < count:
        file = folder / f"prompts-{number:04d}.json"
        if not file.exists():
            _write_part(model, file, options, engine, number * PART)
        before = len(found)
        found.update(dict.fromkeys(json.loads(file.read_text(encoding="utf-8"))))
        if len(found) - before < PART // 50:
            fix = f"the target repeats itself: {len(found)} different prompts after {(number + 1) * PART} tries"
            raise MedusaError.of("self_prompts", count, fix)
        number += 1
        on_progress(min(len(found), count), count)
    return list(found)[:count]


def opening(template: Callable[[str], str]) -> str:
    """What stands before the user's words in a rendered chat.

    >>> opening(lambda words: f"<s>user: {words}</s>assistant:")
    '<s>user: '
    """
    text = template(_MARK)
    if _MARK not in text:
        fix = "the chat template does not show the user's words; give prompts instead"
        raise MedusaError.of("self_prompts", text[:80], fix)
    return text[: text.index(_MARK)]


def usable(text: str) -> str | None:
    """A prompt without spaces around it, or None for one too short to ask anything or full of broken characters."""
    text = text.strip()
    return text if len(text) >= SHORTEST and "\ufffd" not in text else None


def _write_part(model: str, file: Path, options: AnswerOptions, engine: AnsweringEngine, first: int) -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        raise MedusaError.of("self_prompts", model, "the target has no chat template; give prompts or texts instead")

    def template(words: str) -> str:
        chat = [{"role": "user", "content": words}]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    ids = tokenizer(opening(template), add_special_tokens=False)["input_ids"]
    # Seeds of prompts must not be those of answers (see data.py), or an answer would repeat its prompt's luck.
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=LONGEST, seed=2**31 + options.seed + first + i)
        for i in range(PART)
    ]
    outputs: list[Any] = engine.llm.generate([{"prompt_token_ids": ids}] * PART, params, use_tqdm=False)
    ended = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    prompts = [prompt for prompt in map(usable, ended) if prompt is not None]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(prompts, indent=0), encoding="utf-8")
    os.replace(partial, file)
