"""Answers recorded shard by shard: a killed run goes on, temperatures are passes, wrong rows are noticed."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.errors import MedusaError
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.data import record_answers
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
            self.writer, self.names = RowWriter(Path((kwargs or {})["folder"]), 4), []
            return [None]
        self.writer.close()
        return [[], self.names]  # as of two pipeline stages

    def generate(self, prompts: Sequence[dict[str, list[int]]], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            if self.fail_after is not None and len(self.generated) >= self.fail_after:
                raise KeyboardInterrupt
            ids = prompt["prompt_token_ids"]
            answer = [ids[0] + 1 + i for i in range(3)]
            number = len(self.generated)
            self.generated.append(ids)
            self.params.append(param)
            self.names.append(f"{number}-abc")  # vLLM's suffix
            said = len(self.names) - 1
            written = [answer[0], 99, answer[2]] if self.spoil else answer
            self.writer.append([said] * 3, [0, 1, 2], written, torch.zeros(3, 4))
            outputs.append(SimpleNamespace(request_id=str(number), outputs=[SimpleNamespace(token_ids=answer)]))
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


def test_turns_are_answered_one_behind_the_other(answer: Callable[..., list[Path]]) -> None:
    """Prompt 20 has a second turn, which is shown what the first brought; another would leave no room."""
    llm = FakeLLM()
    shown: list[tuple[int, list[list[int]]]] = []

    def follow(prompt: int, answers: Sequence[Sequence[int]]) -> list[int] | None:
        shown.append((prompt, [list(said) for said in answers]))
        return None if prompt == 0 or len(answers) == 3 else [answers[-1][-1]] * (4 if len(answers) == 1 else 14)

    shards = answer(llm, ["10", "20"], follow=follow)
    assert llm.generated == [[10, 10], [20, 20], [23] * 4]
    assert shown == [(0, [[11, 12, 13]]), (1, [[21, 22, 23]]), (1, [[21, 22, 23], [24, 25, 26]])]
    rows = HiddenRows.open(shards)
    assert rows.tokens.tolist() == [11, 12, 13, 21, 22, 23, 24, 25, 26] and rows.sequences[-1] == 2
    assert len({param.seed for param in llm.params}) == 3
    assert json.loads((shards[0] / "done.json").read_text())["answers"] == 3


CLAIMER = """
import sys, time
from pathlib import Path
from vllm_medusa.training.claims import Claim
with Claim(Path(sys.argv[1])) as claim:
    print(claim.take(), flush=True)
    time.sleep(600)
"""


def test_a_shard_that_another_process_makes_is_left_to_it_until_that_dies(
    answer: Callable[..., list[Path]], tmp_path: Path
) -> None:
    lock = tmp_path / "answers" / "shard-0000.lock"
    half = tmp_path / "answers" / "shard-0000.elsewhere-1.partial"
    with subprocess.Popen([sys.executable, "-c", CLAIMER, str(lock)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        half.mkdir()
        llm = FakeLLM()
        threading.Timer(1.0, other.kill).start()
        shards = answer(llm, ["10", "20", "30", "40", "50"])
        assert [ids[0] for ids in llm.generated] == [30, 40, 50, 10, 20], "others first, the dead one's at the end"
    assert HiddenRows.open(shards).tokens.tolist() == [start + i for start in (10, 20, 30, 40, 50) for i in (1, 2, 3)]
    assert not half.exists()


def test_a_shard_that_another_process_is_likely_to_finish_counts(
    answer: Callable[..., list[Path]], tmp_path: Path
) -> None:
    """Enough is being made: nothing is made too much, and what the other brings is waited for."""
    lock = tmp_path / "answers" / "shard-0000.lock"
    options = replace(OPTIONS, max_new_tokens=3)
    with subprocess.Popen([sys.executable, "-c", CLAIMER, str(lock)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        threading.Timer(1.0, other.kill).start()
        llm = FakeLLM()
        shards = answer(llm, ["10", "20", "30", "40"], options, max_tokens=3)
    assert [ids[0] for ids in llm.generated] == [10, 20] and len(shards) == 1
