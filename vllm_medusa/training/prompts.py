"""What the target is asked: prompts in its chat template, or the beginnings of plain documents."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.json_lines import read_json_lines
from vllm_medusa.training.conversation import Chat, Conversation


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSON-lines file: each line has `prompt`, or `turns` of which the first is used."""
    return _read_lines(path, "prompts", lambda row: row["prompt"] if "prompt" in row else row["turns"][0])


def read_conversations(path: Path) -> list[Conversation]:
    """Prompts of a JSON-lines file in full: `prompt`, all `turns`, or `messages`, with `system` and `tools`."""
    found = [Conversation.parse(row, place) for place, row in read_json_lines(path, "prompts")]
    if not found:
        raise MedusaError.of("prompts", str(path), "the file holds no prompt; give at least one line")
    return found


def read_texts(path: Path) -> list[str]:
    """Documents of a JSON-lines file: each line has `text`."""
    return _read_lines(path, "texts", lambda row: row["text"])


def render_prompts(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as the target sees it: chat template applied when its tokenizer has one."""
    chat = open_chat(model)
    return [chat.ask(Conversation.of(prompt)) or [] for prompt in prompts]


def open_chat(model: str) -> Chat:
    """The target's chat template and tokenizer.

    Raises:
        MedusaError: a model without a tokenizer.
    """
    return Chat(_tokenizer(model))


def render_texts(model: str, texts: Sequence[str], length: int) -> list[list[int]]:
    """The first `length` token ids of each document, without a chat template: what the target is to go on from."""
    tokenizer = _tokenizer(model)
    return [tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        fix = f"its tokenizer cannot be read ({reason}); name a model that comes with one"
        raise MedusaError.of("model", model, fix) from error


def _read_lines(path: Path, key: str, pick: Callable[[Any], Any]) -> list[str]:
    wanted = '"prompt", or with "turns" that is not empty' if key == "prompts" else '"text"'
    found = []
    for place, row in read_json_lines(path, key):
        try:
            text = pick(row)
        except (KeyError, TypeError, IndexError) as error:
            raise MedusaError.of(key, place, f"each line must be a JSON object with {wanted}") from error
        if not isinstance(text, str) or not text:
            raise MedusaError.of(key, place, "it must be a string that is not empty")
        found.append(text)
    if not found:
        raise MedusaError.of(key, str(path), "the file holds no prompt; give at least one line")
    return found
