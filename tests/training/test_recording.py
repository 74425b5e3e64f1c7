"""The recording worker in a real engine: every row is the one whose logits chose the token."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import make_llama

from vllm_medusa.heads.target import read_target
from vllm_medusa.training.answering import AnswerOptions
from vllm_medusa.training.data import read_facts, record_answers
from vllm_medusa.training.engine import RECORDER
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.said import Said

VOCAB, HIDDEN = 160, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Llama in float32, saved and in memory."""
    llama = make_llama(seed=7, vocab_size=VOCAB, hidden_size=HIDDEN, eos_token_id=VOCAB - 1)
    folder = tmp_path_factory.mktemp("tiny-llama")
    llama.save_pretrained(folder)
    return SimpleNamespace(folder=folder, llama=llama)


@pytest.mark.slow
def test_rows_are_those_that_chose_the_tokens(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Callable[[int], list[list[int]]]
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2: tests/host/test_device_runs.py
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    ids = prompts(12)
    llm = LLM(
        str(model.folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        worker_cls=RECORDER,
        max_model_len=256,
        block_size=32,
        max_num_seqs=5,  # requests wait for each other
        max_num_batched_tokens=40,  # prompts are prefilled in pieces, which emit nothing
        num_gpu_blocks_override=10,  # five requests do not fit: some are preempted and computed again
        enable_prefix_caching=False,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def counting(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **more)

    monkeypatch.setattr(scheduler, "_preempt_request", counting)
    options = AnswerOptions(max_new_tokens=40, max_model_len=256, shard_size=7)
    shards = record_answers(ids, tmp_path, options, SimpleNamespace(llm=llm))  # type: ignore[arg-type]
    rows = HiddenRows.open(shards)
    assert preempted, "the cache was large enough for all: make it smaller"
    assert len(shards) == 2 and len(np.unique(rows.sequences)) == 12
    assert len(rows) == sum(read_facts(shard)["tokens"] for shard in shards), "a token has one row"
    for shard in shards:  # what vLLM said itself, by the layers it serves with
        said = Said.read(shard)
        assert said is not None and len(said.rows) and said.distance(read_target(model.folder)) < 1e-3
    hidden = rows.gather(np.arange(len(rows))).float()
    with torch.inference_mode():
        logits = model.llama.lm_head(hidden)
        chosen = logits.argmax(1).numpy() == rows.tokens
        # Stored as bfloat16: where the two best logits are closer than its 0.4 percent, the other may come out ahead.
        assert chosen.mean() > 0.97
        # Against transformers, from the prompt: row i is the last hidden state before token i.
        for number, prompt in enumerate(ids):
            here = rows.sequences == number
            whole = torch.tensor([prompt + rows.tokens[here].tolist()])
            wanted = model.llama.model(whole).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(hidden[torch.from_numpy(here)], wanted, rtol=2e-2, atol=2e-2)


@pytest.fixture
def prompts() -> Callable[[int], list[list[int]]]:
    """Random prompts of 1 to 90 tokens."""

    def make(count: int) -> list[list[int]]:
        rng = np.random.default_rng(3)
        return [rng.integers(2, VOCAB - 1, int(length)).tolist() for length in rng.integers(1, 90, count)]

    return make


@pytest.mark.slow
def test_a_worker_ends_when_its_owner_is_gone() -> None:
    """However the owner went: the host's own processes would work on for nobody, into a folder that may be in use."""
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = f"from vllm_medusa.host.owned import end_with; print('up', flush=True); end_with({owner.pid}, {owner.pid})"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        while "up" not in (line := worker.stdout.readline()):
            assert line, "the worker did not start"
        time.sleep(0.7)
        assert worker.poll() is None
        owner.kill()
        owner.wait()
        assert worker.wait(timeout=10) == 1
    finally:
        for process in (owner, worker):
            process.kill()
            process.wait()
