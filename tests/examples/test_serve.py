"""examples/serve.sh with the real OpenAI client: what users do to a server, and then that it ends cleanly."""

import asyncio
import itertools
import json
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
from prometheus_client.parser import text_string_to_metric_families
from served import Server
from storm import Storm, blow

from vllm_medusa.bench.server import REQUEST_STEPS

pytestmark = [pytest.mark.slow, pytest.mark.server]

COUNTED = ["steps", "request_steps", "drafted_nodes", "wasted_nodes", "emitted_tokens", "accepted_nodes_by_depth"]
OURS = [f"vllm_medusa:{name}_total" for name in (*COUNTED, "accepted_nodes_by_rank")]
VLLMS = [
    f"vllm:{name}_total"
    for name in ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
]
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


def total(metrics: str, name: str) -> float:
    """A metric's sum over all its labels."""
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name + "{"))


def running_requests(server: Server) -> float:
    return total(server.get("/metrics"), "vllm:num_requests_running")


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


def test_a_small_storm(client: OpenAI, server: Server) -> None:
    """Many at once, some that hang up, some malformed (tests/load has it larger, against plain vLLM)."""
    storm = Storm(60, seed=2, longest=12)
    answers = asyncio.run(blow(server.url, storm.requests, clients=16))
    for request, answer in zip(storm.requests, answers, strict=True):
        if request.malformed is None:
            assert answer.status == 200, (request, answer)
        else:
            assert 400 <= answer.status <= 499 and "Traceback" not in answer.error, (request, answer)
        if request.good:
            assert answer.finish in ("stop", "length"), (request, answer)
    assert sum(request.hangs_up is not None for request in storm.requests) == 6
    end = time.monotonic() + 60
    while running_requests(server) and time.monotonic() < end:
        time.sleep(0.2)
    assert running_requests(server) == 0
    assert ask(client, "Are you still there?")


def test_metrics_agree(client: OpenAI, server: Server) -> None:
    """Ours with vLLM's own and with what the client got, counted in three processes."""

    def now() -> dict[str, float]:
        return {name: total(server.get("/metrics"), name) for name in (*OURS, *VLLMS, REQUEST_STEPS)}

    before = now()
    while (again := now()) != before:  # an engine tells what is left a moment after its last request
        before = again
        time.sleep(0.5)
    requests, tokens = 4, 0
    for number in range(requests):
        prompt = f"The numbers after {number} are"
        answer = client.completions.create(model="model", prompt=prompt, max_tokens=40, temperature=0.0)
        assert answer.usage is not None
        tokens += answer.usage.completion_tokens
    after = now()
    more = {name: after[name] - before[name] for name in before}
    assert more["vllm:generation_tokens_total"] == tokens
    assert more["vllm_medusa:emitted_tokens_total"] == tokens - requests  # the first token comes with the prompt
    assert more["vllm_medusa:drafted_nodes_total"] == more["vllm:spec_decode_num_draft_tokens_total"] > 0
    accepted = more["vllm_medusa:accepted_nodes_by_depth_total"]
    assert accepted == more["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert more["vllm_medusa:wasted_nodes_total"] == more["vllm_medusa:drafted_nodes_total"] - accepted
    assert more["vllm_medusa:accepted_nodes_by_rank_total"] == accepted
    assert more["vllm_medusa:request_steps_total"] == more["vllm_medusa:steps_total"] < tokens - requests
    assert more["vllm_medusa:request_steps_total"] == more[REQUEST_STEPS]


def test_dashboard_asks_for_metrics_that_are_there(repository: Path, server: Server) -> None:
    """Each metric of the example dashboard, with the labels by which it is asked."""
    dashboard = json.loads((repository / "examples" / "grafana_dashboard.json").read_text())
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    asked = [query["expr"] for panel in dashboard["panels"] for query in panel["targets"]]
    asked += [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    ours = set()
    for term in (term for expression in asked for term in expression.split("/")):
        (name,) = re.findall(r"vllm\w*:\w+", term)
        assert labels.get(name, set()) >= {"model_name", "engine", *re.findall(r"by \((\w+)\)", term)}, term
        ours |= {name} if name.startswith("vllm_medusa:") else set()
    assert ours == {name for name in labels if name.startswith("vllm_medusa:") and not name.endswith("_created")}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels lie side by side"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places) and dashboard["schemaVersion"] >= 38


def test_metrics_example(repository: Path, server: Server) -> None:
    command = [sys.executable, "examples/read_metrics.py", "--port", str(server.port)]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    rows = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in result.stdout.splitlines())
    text = server.get("/metrics")
    mean = total(text, "vllm_medusa:emitted_tokens_total") / total(text, "vllm_medusa:request_steps_total")
    assert rows["tokens per request and step"] == f"{mean:.2f}"
    assert int(rows["nodes drafted"]) > int(rows["of these wasted"]) > 0
    assert re.match(r"1: 0\.\d\d, 2: ", rows["acceptance by depth"])
    assert len(rows) == 11


def test_metrics_of_an_engine_that_is_not_there(repository: Path, server: Server) -> None:
    command = [sys.executable, "examples/read_metrics.py", "--port", str(server.port), "--engine", "7"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "no figures of Medusa" in result.stderr


def test_log_line(server: Server) -> None:
    """After vLLM's own about drafts."""
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if "metrics: Mean accept" in line]
    said = [following for line, following in itertools.pairwise(lines) if "SpecDecoding metrics: " in line]
    assert any(
        re.search(r"Medusa metrics: Mean accepted length: \d\.\d\d, Drafted: \d+ nodes, ", line) for line in said
    )


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
    assert total(server.get("/metrics"), "vllm:spec_decode_num_draft_tokens_total") > 0


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
