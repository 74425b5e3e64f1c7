"""The HTTP client of the bench, against a server of a few lines that answers as vLLM does."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp", reason="comes with vLLM")
from aiohttp import web

from vllm_medusa.bench.client import Answer, Client, ServerError, read_counters
from vllm_medusa.bench.server import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAUSE = 0.05


@asynccontextmanager
async def serving(completions: Handler) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", lambda _: _ok())
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with Client(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await runner.cleanup()


async def _ok() -> web.Response:
    return web.Response()


def streaming(*chunks: list[int], ends: bool = True) -> Handler:
    """A handler that sends these tokens chunk by chunk, with a pause before each chunk but the first."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, tokens in enumerate(chunks):
            await asyncio.sleep(PAUSE if number else 0.0)
            reason = "length" if ends and number == len(chunks) - 1 else None
            chunk = {"choices": [{"text": "", "token_ids": tokens, "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def ask(handler: Handler) -> Answer:
    async def asked() -> Answer:
        async with serving(handler) as client:
            assert await client.healthy()
            return await client.ask({"prompt": [1]})

    return asyncio.run(asked())


def test_tokens_and_when_they_came() -> None:
    """A chunk without tokens (half a character) is no arrival; the last one may come with the end."""
    answer = ask(streaming([5], [], [6, 7], [8]))
    assert answer.tokens == [5, 6, 7, 8]
    assert [count for _, count in answer.arrivals] == [1, 2, 1]
    assert answer.first_token < 2 * PAUSE  # sent at once
    latencies = answer.inter_token()
    assert latencies[0] == latencies[1]  # two tokens of one chunk share its gap
    assert latencies[0] >= 0.9 * PAUSE
    assert sum(latencies) == pytest.approx(answer.arrivals[-1][0] - answer.first_token)


def test_first_chunk_counts_as_first_token_only() -> None:
    assert Answer([1, 2, 3], [(0.5, 3)]).inter_token() == []


@pytest.mark.parametrize("handler", [streaming([5], [6], ends=False), streaming([], ends=True)])
def test_unfinished_answers_are_errors(handler: Handler) -> None:
    with pytest.raises(ServerError, match="before its last token"):
        ask(handler)


def test_errors_carry_the_servers_words() -> None:
    async def refusing(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    with pytest.raises(ServerError, match="too long"):
        ask(refusing)


def test_a_new_request_starts_as_soon_as_one_ends() -> None:
    """Never more than two in flight, and answers in the order of their requests."""
    flying, most = 0, 0
    seen: list[int] = []

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        (prompt,) = (await request.json())["prompt"]
        response = await streaming(*([prompt] for _ in range(1 + prompt % 3)))(request)
        flying -= 1
        return response

    async def asked() -> list[Answer]:
        async with serving(counting) as client:
            requests = [{"prompt": [number]} for number in range(7)]
            return await client.ask_all(requests, 2, lambda message: seen.append(message["finished"]))

    answers = asyncio.run(asked())
    assert most == 2
    assert [answer.tokens for answer in answers] == [[number] * (1 + number % 3) for number in range(7)]
    assert seen == [1, 2, 3, 4, 5, 6, 7]


def test_nobody_there_is_not_healthy() -> None:
    async def asked() -> bool:
        async with Client(f"http://127.0.0.1:{free_port()}") as client:
            return await client.healthy()

    assert not asyncio.run(asked())


def test_counters_add_up_over_labels() -> None:
    text = (
        "# TYPE vllm:x_total counter\n"
        'vllm:x_total{engine="0",position="0"} 2.0\nvllm:x_total{engine="0",position="1"} 1.0\n'
        'vllm:y_seconds_bucket{le="0.5"} 7.0\nvllm:y_seconds_count{engine="0"} 9.0\nprocess_cpu_seconds_total 4.5\n'
    )
    assert read_counters(text) == {"vllm:x_total": 3.0, "vllm:y_seconds_bucket": 7.0, "vllm:y_seconds_count": 9.0}
