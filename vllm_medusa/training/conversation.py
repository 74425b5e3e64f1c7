"""What the target is asked, turn by turn: system prompt, tools and a user's words, as its chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_medusa.errors import MedusaError

_FIX = 'each line must be a JSON object with "prompt", or with "turns" or "messages" that is not empty'


@dataclass(frozen=True)
class Conversation:
    """Messages in as many parts as the target answers; behind each part it does.

    Attributes:
        parts: JSON of each part's messages, as chat templates take them.
        tools: JSON of the tools that the target may call; "": none.

    >>> Conversation.of("Why?").key
    'Why?'
    >>> len(Conversation.parse({"turns": ["Why?", "Really?"]}, "file:1").parts)
    2
    """

    parts: tuple[str, ...]
    tools: str = ""

    @classmethod
    def of(cls, words: str) -> Conversation:
        """One user's turn."""
        return cls((_written([{"role": "user", "content": words}]),))

    @classmethod
    def parse(cls, row: Any, place: str) -> Conversation:
        """From one line of a file.

        Args:
            row: `prompt`, `turns` of a user with perhaps `system`, or `messages`; and perhaps `tools`. What an
                assistant said in `messages` is said by the target anew, but for its calls of tools.
            place: for messages.

        Raises:
            MedusaError: none of these.
        """
        if not isinstance(row, dict):
            raise MedusaError.of("prompts", place, _FIX)
        if "messages" in row:
            parts = _parts(row["messages"], place)
        else:
            turns = [row["prompt"]] if "prompt" in row else row.get("turns")
            if not isinstance(turns, list) or not turns:
                raise MedusaError.of("prompts", place, _FIX)
            parts = [[{"role": "user", "content": _words(turn, place)}] for turn in turns]
            if "system" in row:
                parts[0].insert(0, {"role": "system", "content": _words(row["system"], place)})
        tools = row.get("tools")
        if tools and not isinstance(tools, list):
            raise MedusaError.of(
                "prompts", place, '"tools" must be a list of JSON objects, as chat templates take them'
            )
        return cls(tuple(map(_written, parts)), _written(tools) if tools else "")

    @property
    def key(self) -> str:
        """Equal for equal conversations: the user's words where there is nothing else."""
        messages = json.loads(self.parts[0])
        plain = len(self.parts) == len(messages) == 1 and messages[0].keys() == {"role", "content"} and not self.tools
        words = messages[0]["content"] if plain and messages[0]["role"] == "user" else None
        return words if isinstance(words, str) else "\n".join([*self.parts, self.tools])

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """All that the target is shown when it answers part `len(answers)`."""
        shown: list[dict[str, Any]] = []
        for number, part in enumerate(self.parts[: len(answers) + 1]):
            shown += json.loads(part)
            if number < len(answers):
                shown.append({"role": "assistant", "content": answers[number]})
        return shown


class Chat:
    """A target's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: as transformers loads it."""
        self._tokenizer = tokenizer

    def ask(self, conversation: Conversation, answers: Sequence[Sequence[int]] = ()) -> list[int] | None:
        """Token ids of what the target is shown when it answers the next part; None: nothing is left to answer.

        Args:
            conversation: what is asked.
            answers: tokens of the parts answered so far. Thoughts in them stay if the template keeps them, as they do
                when it serves.

        Raises:
            MedusaError: a conversation that the chat template does not take.
        """
        if len(answers) >= len(conversation.parts):
            return None
        shown = conversation.messages([self._text(answer) for answer in answers])
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            if answers:
                return None  # nobody knows how this model would be shown a second turn
            return list(tokenizer(shown[-1]["content"])["input_ids"])
        tools = json.loads(conversation.tools) if conversation.tools else None
        try:
            text = tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            fix = f"the model's chat template does not take it ({reason}); leave it out"
            raise MedusaError.of("prompts", conversation.key[:80], fix) from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, answer: Sequence[int]) -> str:
        """As the template is given it when serving: without the token that ended it."""
        special, kept = set(self._tokenizer.all_special_ids), list(answer)
        while kept and kept[-1] in special:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


def _parts(messages: Any, place: str) -> list[list[dict[str, Any]]]:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise MedusaError.of("prompts", place, '"messages" must be a list of JSON objects with "role" and "content"')
    parts: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            parts[-1].append(message)
        elif message.get("tool_calls"):
            parts[-1].append(message)  # what follows is what these tools said
        elif parts[-1]:
            parts.append([])
    parts = [part for part in parts if part]
    if not parts:
        raise MedusaError.of("prompts", place, _FIX)
    return parts


def _words(words: Any, place: str) -> str:
    if not isinstance(words, str) or not words:
        raise MedusaError.of("prompts", place, "it must be a string that is not empty")
    return words


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
