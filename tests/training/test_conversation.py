"""Prompts of several turns: what the target is shown at each, by its own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import small_tokenizer

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.conversation import Chat, Conversation
from vllm_medusa.training.prompts import read_conversations

TEMPLATE = (
    "{% if tools %}[{{ tools | map(attribute='name') | join(',') }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}!{{ m.tool_calls[0].name }}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "clock"}]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = small_tokenizer("what is the time now? <user> <assistant> <think> hm </think> it is late ", 320)
    made.chat_template = TEMPLATE
    return made


def shown(tokenizer: Any, row: dict[str, Any], *answers: str) -> str | None:
    said = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    ids = Chat(tokenizer).ask(Conversation.parse(row, "file:1"), said)
    return None if ids is None else str(tokenizer.decode(ids))


def test_each_turn_is_answered_behind_the_targets_own_answers(tokenizer: Any) -> None:
    row = {"system": "Be brief.", "turns": ["What?", "And now?"]}
    assert shown(tokenizer, row) == "<system>Be brief.</s><user>What?</s><assistant>"
    # The token that ended the answer is the template's; thoughts stay what they were.
    second = shown(tokenizer, row, "<think>hm</think> late</s>")
    assert second == (
        "<system>Be brief.</s><user>What?</s><assistant><think>hm</think> late</s><user>And now?</s><assistant>"
    )
    assert shown(tokenizer, row, "a", "b") is None


def test_what_an_assistant_said_is_said_anew_but_for_calls_of_tools(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "Time?"},
        CALL,
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon, somebody said."},
        {"role": "user", "content": "Sure?"},
    ]
    row = {"messages": messages, "tools": [{"name": "clock"}]}
    assert shown(tokenizer, row) == "[clock]<user>Time?</s><assistant>!clock</s><tool>12:00</s><assistant>"
    second = str(shown(tokenizer, row, "12"))
    assert "somebody" not in second and second.endswith("Sure?</s><assistant>")


def test_without_a_chat_template_only_the_first_turn_is_asked() -> None:
    plain = small_tokenizer("what is it", 300)
    assert shown(plain, {"turns": ["what", "is"]}) == "what" and shown(plain, {"turns": ["what", "is"]}, "it") is None


def test_a_template_that_refuses_is_one_error(tokenizer: Any) -> None:
    tokenizer = small_tokenizer("what", 300)
    tokenizer.chat_template = "{{ raise_exception('no system prompts here') }}"
    with pytest.raises(MedusaError, match=r"does not take it \(no system prompts here\)"):
        Chat(tokenizer).ask(Conversation.of("what"))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": []}, "is not empty"),
        ({"messages": [{"role": "assistant", "content": "alone"}]}, "is not empty"),
        ({"messages": ["no"]}, '"role" and "content"'),
        ({"turns": ["a", 3]}, "must be a string"),
        ({"prompt": "a", "system": 3}, "must be a string"),
        ({"prompt": "a", "tools": {"name": "x"}}, '"tools" must be a list'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(MedusaError, match=rf"prompts\.jsonl:1.*{named}"):
        read_conversations(file)


def test_a_single_turn_is_known_by_its_words() -> None:
    """As it was before there were turns: rows recorded then serve on."""
    assert Conversation.parse({"turns": ["Why?"]}, "").key == Conversation.parse({"prompt": "Why?"}, "").key == "Why?"
    assert Conversation.parse({"turns": ["Why?", "So?"]}, "").key != "Why?"
    assert Conversation.parse({"prompt": "Why?", "system": "Be kind."}, "").key != "Why?"
