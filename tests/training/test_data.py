"""Prompts in, answers recorded shard by shard: bad files have names, a killed run goes on, wrong rows are noticed."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_medusa.errors import MedusaError
from vllm_medusa.training import data
from vllm_medusa.training.data import AnswerOptions, read_prompts, record_answers
from vllm_medusa.training.hidden import HiddenRows, RowWriter

OPTIONS = AnswerOptions(max_new_tokens=3, max_model_len=16, shard_size=2, seed=5)


@dataclass
class FakeLLM:
    """Answers a prompt [a, ...] with a+1, a+2, a+3 and writes their rows as the recording worker would."""

    fail_after: int | None = None
    spoil: bool = False
    generated: list[list[int]] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)

    def collective_rpc(self, method: str, kwargs: dict[str, str] | None = None) -> list[Any]:
        if method == "start_recording":
            self.folder = Path((kwargs or {})["folder"])
            return [None]
        return [self.names]

    def generate(self, prompts: Sequence[dict[str, list[int]]], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        writer = RowWriter(self.folder, 4)
        outputs, self.names = [], []
        for prompt, param in zip(prompts, params, strict=True):
            if self.fail_after is not None and len(self.generated) >= self.fail_after:
                raise KeyboardInterrupt
            ids = prompt["prompt_token_ids"]
            answer = [ids[0] + 1 + i for i in range(3)]
            number = len(self.generated)
            self.generated.append(ids)
            self.params.append(param)
            self.names.append(f"{number}-abc")  # vLLM's suffix
            written = [answer[0], 99, answer[2]] if self.spoil else answer
            writer.append([len(outputs)] * 3, [0, 1, 2], written, torch.zeros(3, 4))
            outputs.append(SimpleNamespace(request_id=str(number), outputs=[SimpleNamespace(token_ids=answer)]))
        writer.close()
        return outputs


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Path]]:
    """record_answers with a fake engine; a prompt is a number, its only token."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(data, "render_prompts", lambda model, prompts: [[int(prompt)] * 2 for prompt in prompts])

    def run(llm: FakeLLM, prompts: Sequence[str], options: AnswerOptions = OPTIONS, **more: Any) -> list[Path]:
        engine = SimpleNamespace(llm=llm)
        return record_answers("target", prompts, tmp_path / "answers", options, engine=engine, **more)  # type: ignore[arg-type]

    return run


def test_every_prompt_is_answered_in_order(answer: Callable[..., list[Path]]) -> None:
    seen: list[tuple[int, int]] = []
    shards = answer(FakeLLM(), ["10", "20", "30"], on_progress=lambda *done: seen.append(done))
    assert HiddenRows.open(shards).tokens.tolist() == [11, 12, 13, 21, 22, 23, 31, 32, 33]
    assert seen == [(2, 6), (3, 9)]


def test_it_stops_when_there_are_enough_tokens(answer: Callable[..., list[Path]]) -> None:
    llm = FakeLLM()
    shards = answer(llm, [str(number) for number in range(10, 20)], max_tokens=7)
    assert len(shards) == 2 and len(llm.generated) == 4


def test_a_killed_run_goes_on_with_the_shard_it_was_in(answer: Callable[..., list[Path]]) -> None:
    prompts = ["10", "20", "30", "40", "50"]
    with pytest.raises(KeyboardInterrupt):
        answer(FakeLLM(fail_after=3), prompts)
    again = FakeLLM()
    shards = answer(again, prompts)
    assert [ids[0] for ids in again.generated] == [30, 40, 50]
    assert HiddenRows.open(shards).tokens.tolist() == [start + i for start in (10, 20, 30, 40, 50) for i in (1, 2, 3)]


def test_finished_rows_need_no_engine(answer: Callable[..., list[Path]]) -> None:
    first = answer(FakeLLM(), ["10", "20"])
    assert answer(FakeLLM(fail_after=0), ["10", "20"]) == first


def test_rows_that_do_not_match_the_answer_are_noticed(answer: Callable[..., list[Path]]) -> None:
    with pytest.raises(RuntimeError, match="do not match"):
        answer(FakeLLM(spoil=True), ["10"])


def test_sampled_and_greedy_answers_are_mixed_as_asked(answer: Callable[..., list[Path]]) -> None:
    llm = FakeLLM()
    options = AnswerOptions(
        max_new_tokens=3, max_model_len=16, shard_size=400, temperature=0.8, sampled_share=0.25, seed=1
    )
    (shard,) = answer(llm, [str(number) for number in range(400)], options)
    sampled = sum(param.temperature == 0.8 for param in llm.params)
    assert sampled == json.loads((shard / "done.json").read_text())["sampled_prompts"]
    assert 70 <= sampled <= 130  # 100 of 400 expected, three standard deviations
    assert all(param.temperature in (0.0, 0.8) for param in llm.params)


def test_prompts_that_leave_no_room_are_left_out(answer: Callable[..., list[Path]]) -> None:
    with pytest.raises(MedusaError, match="max_model_len=4"):
        answer(FakeLLM(), ["10"], AnswerOptions(max_new_tokens=3, max_model_len=4))


def test_prompts_are_read_from_prompt_or_the_first_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"turns": ["two", "three"]}\n', encoding="utf-8")
    assert read_prompts(file) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nnot json\n', r"prompts\.jsonl:2"),
        ('{"question": "a"}\n', r"prompts\.jsonl:1"),
        ('{"turns": []}\n', r"prompts\.jsonl:1"),
        ('{"prompt": 3}\n', "must be a string"),
        ('{"prompt": ""}\n', "not empty"),
        ("[1]\n", r"prompts\.jsonl:1"),
        ("3\n", r"prompts\.jsonl:1"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(MedusaError, match=named):
        read_prompts(file)


def test_a_missing_or_binary_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MedusaError, match="cannot be read"):
        read_prompts(tmp_path / "binary")
