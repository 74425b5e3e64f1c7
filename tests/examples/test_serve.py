"""examples/serve.sh with the real OpenAI client: what users do to a server, and then that it ends cleanly."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from served import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]

QUESTION = [{"role": "user", "content": "Count from 1 to 20."}]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0) as opened:
        yield opened


def ask(client: OpenAI, question: str, tokens: int = 32) -> str:
    answer = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0.0
    )
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= tokens
    return answer.choices[0].message.content or ""


def running_requests(server: Server) -> float:
    lines = server.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def test_chat(client: OpenAI) -> None:
    assert ask(client, "What is the capital of France?")


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="model", prompt="Once upon a time", max_tokens=24, temperature=0.0)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == "length"


def test_echo_tells_the_prompt_and_its_log_probabilities(client: OpenAI) -> None:
    prompt = "Once upon a time"
    answer = client.completions.create(
        model="model", prompt=prompt, max_tokens=8, temperature=0.0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None  # nothing comes before the first token
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_streaming_says_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="model", messages=QUESTION, max_tokens=48, temperature=0.0)
    stream = client.chat.completions.create(
        model="model", messages=QUESTION, max_tokens=48, temperature=0.0, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len([part for part in parts if part]) > 1


def test_stop_string_cuts_inside_an_accepted_path(client: OpenAI) -> None:
    """Several tokens may come in one step: nothing after the stop string may leak out."""
    whole = client.chat.completions.create(model="model", messages=QUESTION, max_tokens=48, temperature=0.0)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(model="model", messages=QUESTION, max_tokens=48, temperature=0.0, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]


def test_several_at_once(client: OpenAI) -> None:
    questions = [f"Write one sentence about the number {number}." for number in range(6)]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(client, question), questions))
    assert all(answers)


def test_aborted_stream_frees_its_place(client: OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model="model", messages=QUESTION, max_tokens=1500, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert running_requests(server) == 1
    stream.close()
    end = time.monotonic() + 60
    while running_requests(server) and time.monotonic() < end:
        time.sleep(0.2)
    assert running_requests(server) == 0
    assert ask(client, "Are you still there?")


def test_trees_were_used(server: Server) -> None:
    lines = server.get("/metrics").splitlines()
    drafted = sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    )
    assert drafted > 0


def test_client_example(repository: Path, server: Server) -> None:
    command = [sys.executable, "examples/chat_client.py", "--port", str(server.port), "Say hello."]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_sigterm_ends_everything(server: Server) -> None:
    """Last in this file: the server is gone afterwards."""
    family = server.family()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=120) in (0, -signal.SIGTERM)
    _gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    log = server.log.read_text(errors="replace")
    # The host itself now and then logs an EngineDeadError of its own when its parts end in another order.
    assert not re.search(r'File "[^"]*/vllm_medusa/', log), log[-4000:]
