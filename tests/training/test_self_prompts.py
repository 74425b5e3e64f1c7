"""Prompts that the target invents: different ones, the same for a seed, nothing made twice, nothing unfinished."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_medusa.errors import MedusaError
from vllm_medusa.training import self_prompts
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.self_prompts import invent_prompts, opening, usable


class Inventor:
    """Says a sentence that depends on the seed; every third has not ended, every fifth repeats."""

    def __init__(self, variety: int = 10**9) -> None:
        self.calls, self.variety = 0, variety

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        assert all(prompt == {"prompt_token_ids": [7, 8]} for prompt in prompts)
        self.calls += 1
        outputs = []
        for param in params:
            drawn = param.seed - 2**31
            number = 1 if drawn % 5 == 0 else drawn % self.variety
            reason = "length" if number % 3 == 0 else "stop"
            answer = SimpleNamespace(text=f" Please explain number {number}. ", finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[answer]))
        return outputs


class Tokenizer:
    chat_template: str | None = "some"

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        return f"<user>{chat[0]['content']}<end><assistant>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert text == "<user>" and not add_special_tokens
        return {"input_ids": [7, 8]}


@pytest.fixture
def invent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    auto = SimpleNamespace(from_pretrained=lambda _: Tokenizer())
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    monkeypatch.setattr(self_prompts, "PART", 60)

    def run(llm: Inventor, count: int, seed: int = 0) -> list[str]:
        return invent_prompts("target", count, tmp_path, AnswerOptions(seed=seed), SimpleNamespace(llm=llm))  # type: ignore[arg-type]

    return run


def test_they_are_different_finished_and_as_many_as_asked(invent: Callable[..., list[str]]) -> None:
    prompts = invent(Inventor(), 70)
    assert len(set(prompts)) == len(prompts) == 70
    assert prompts[0].startswith("Please explain") and prompts[0].endswith(".")
    assert all(int(prompt.split()[-1].strip(".")) % 3 != 0 for prompt in prompts)


def test_nothing_is_made_twice_and_more_goes_on_from_there(invent: Callable[..., list[str]], tmp_path: Path) -> None:
    first = invent(Inventor(), 30)
    (tmp_path / "prompts-0001.partial").write_text('["half of a killed r')
    again, more = Inventor(), Inventor()
    assert invent(again, 30) == first and again.calls == 0
    assert invent(more, 50)[:30] == first and more.calls == 1
    assert json.loads((tmp_path / "prompts-0000.json").read_text())


def test_a_target_that_repeats_itself_is_named(invent: Callable[..., list[str]]) -> None:
    with pytest.raises(MedusaError, match=r"self_prompts=200: .*repeats itself"):
        invent(Inventor(variety=20), 200)


def test_a_target_without_a_chat_template_is_named(
    invent: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    with pytest.raises(MedusaError, match="no chat template"):
        invent(Inventor(), 5)


def test_the_opening_is_all_before_the_users_words() -> None:
    assert opening(lambda words: f"<system>be good<user>\n{words}<assistant>") == "<system>be good<user>\n"
    with pytest.raises(MedusaError, match="does not show"):
        opening(lambda words: "nothing of them")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("  How do I boil an egg?\n", "How do I boil an egg?"), ("Hi", None), ("broken \ufffd characters", None)],
)
def test_what_is_no_prompt_is_dropped(text: str, wanted: str | None) -> None:
    assert usable(text) == wanted
