"""Answers recorded shard by shard: a killed run goes on, temperatures are passes, wrong rows are noticed."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.data import AnswerOptions, record_answers
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
    """record_answers with a fake engine; a prompt is a number, twice."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))

    def run(llm: FakeLLM, prompts: Sequence[str], options: AnswerOptions = OPTIONS, **more: Any) -> list[Path]:
        ids = [[int(prompt)] * 2 for prompt in prompts]
        return record_answers(ids, tmp_path / "answers", options, SimpleNamespace(llm=llm), **more)  # type: ignore[arg-type]

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


def test_each_temperature_is_a_pass_over_all_prompts(answer: Callable[..., list[Path]]) -> None:
    llm = FakeLLM()
    options = replace(OPTIONS, temperatures=(0.0, 0.8))
    shards = answer(llm, ["10", "20", "30"], options)
    assert [param.temperature for param in llm.params] == [0.0] * 3 + [0.8] * 3
    assert [json.loads((shard / "done.json").read_text())["temperature"] for shard in shards] == [0.0, 0.0, 0.8, 0.8]
    assert len({param.seed for param in llm.params}) == 6  # no two answers share their random numbers
    assert len(np.unique(HiddenRows.open(shards).sequences)) == 6


def test_another_temperature_may_be_added_later_but_none_changed(answer: Callable[..., list[Path]]) -> None:
    prompts = ["10", "20", "30"]
    answer(FakeLLM(), prompts)
    more = FakeLLM()
    answer(more, prompts, replace(OPTIONS, temperatures=(0.0, 0.8)))
    assert [param.temperature for param in more.params] == [0.8] * 3
    with pytest.raises(MedusaError, match="temperatures"):
        answer(FakeLLM(), prompts, replace(OPTIONS, temperatures=(0.8,)))


def test_prompts_that_leave_no_room_are_left_out(answer: Callable[..., list[Path]]) -> None:
    with pytest.raises(MedusaError, match="max_model_len=4"):
        answer(FakeLLM(), ["10"], AnswerOptions(max_new_tokens=3, max_model_len=4))
