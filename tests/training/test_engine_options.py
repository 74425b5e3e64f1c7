"""Options of `vllm serve` behind `train` and `calibrate`: read as vLLM reads them, handed on, refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_medusa.commands.engine_options import parse_engine_arguments
from vllm_medusa.errors import MedusaError
from vllm_medusa.training.answering import AnswerOptions, engine_arguments, fit_to_model


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--tensor-parallel-size 8 -pp 2", {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
        ("--quantization fp8 --load-format dummy", {"quantization": "fp8", "load_format": "dummy"}),
        ("--gpu-memory-utilization=0.7 --max-model-len 16k", {"gpu_memory_utilization": 0.7, "max_model_len": 16_000}),
        ("--revision main --trust-remote-code", {"revision": "main", "trust_remote_code": True}),
        ("--distributed-executor-backend ray", {"distributed_executor_backend": "ray"}),
        ('--hf-overrides {"rope_theta":1e6}', {"hf_overrides": {"rope_theta": 1e6}}),
    ],
)
def test_what_is_given_is_handed_on(words: str, given: dict[str, Any]) -> None:
    """And nothing else: vLLM's defaults stay vLLM's."""
    assert parse_engine_arguments(words.split()) == given


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--no-such-thing 3", "option='--no-such-thing': neither this command nor vllm serve knows it"),
        ("--tensor-parallel-size many", "vLLM says: .*tensor-parallel-size"),
        ("--data-parallel-size 2", "data_parallel_size=2: start this command that many times.*one --work folder"),
        ('--speculative-config {"method":"ngram"}', "speculative_config=.*answers plainly"),
        ("--worker-cls x.Y", "worker_cls='x.Y': ours records the rows"),
    ],
)
def test_what_cannot_be_is_named(words: str, named: str) -> None:
    with pytest.raises(MedusaError, match=named):
        parse_engine_arguments(words.split())


def test_the_command_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from vllm_medusa.cli import app
    from vllm_medusa.training import run

    asked: list[Any] = []
    monkeypatch.setattr(run, "train", lambda options, console: asked.append(options))
    words = ["train", "--model", "m", "--prompts", "p", "--tensor-parallel-size", "2", "--out", "o", "--epochs", "1"]
    assert CliRunner().invoke(app, [*words, "--kv-cache-dtype=fp8"]).exit_code == 0
    (options,) = asked
    assert options.answers.engine == {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"} and options.loop.epochs == 1
    result = CliRunner().invoke(app, [*words, "--epoch", "3"])
    assert result.exit_code == 1 and len(asked) == 1


def test_they_win_over_our_own_and_decide_which_rows_fit_together() -> None:
    options = AnswerOptions(engine={"max_num_seqs": 7, "dtype": "float16", "tensor_parallel_size": 2})
    arguments = engine_arguments("m", options)
    assert (arguments["max_num_seqs"], arguments["dtype"], arguments["tensor_parallel_size"]) == (7, "float16", 2)
    plain, wide = AnswerOptions(dtype="float16"), AnswerOptions(engine={"dtype": "float16", "tensor_parallel_size": 2})
    assert plain.recipe() == wide.recipe() != AnswerOptions(engine={"quantization": "fp8"}).recipe()


def test_answers_are_as_long_as_the_context_lets_them() -> None:
    def fitted(**given: Any) -> tuple[int, int]:
        options = fit_to_model("nowhere", AnswerOptions(**given))
        return options.longest, options.longest_answer

    assert fitted() == (8192, 2048)
    assert fitted(max_model_len=2048) == (2048, 1024)
    assert fitted(max_model_len=1000) == (1000, 500)
    assert fitted(max_new_tokens=160) == (8192, 160)
    assert fitted(engine={"max_model_len": 40_000}) == (40_000, 10_000)
