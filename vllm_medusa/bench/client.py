"""Asking a `vllm serve` as its users do: by HTTP, streamed, a fixed number of requests in flight."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp  # what vLLM's own bench asks servers with, so it is there where vLLM is

SILENCE_SECONDS = 900.0  # a first request may wait for kernels that are built on first use


class ServerError(Exception):
    """A server that answers with an error, or not to the end."""


@dataclass
class Answer:
    """One streamed answer: its tokens and when they came.

    `arrivals`: for each chunk with tokens, the seconds since the request was sent and the number of its tokens.
    """

    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.arrivals[0][0]

    def inter_token(self) -> list[float]:
        """Seconds between tokens, one value for each token after the first chunk.

        A chunk's tokens share the time since the chunk before: n tokens after a gap of g are n latencies of g / n. So
        every token counts once and the values add up to the time of decoding, however many tokens a step brings.

        >>> Answer([5, 6, 7], [(0.5, 1), (1.0, 2)]).inter_token()
        [0.25, 0.25]
        """
        shared: list[float] = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            shared += [(now - before) / count] * count
        return shared


class Client:
    """One server at `url`. Use it as an asynchronous context manager; it keeps its connections open."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS)
        self._session = aiohttp.ClientSession(self._url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether the server answers yet."""
        try:
            async with self._session.get("/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers `body`; raises ServerError with the server's words."""
        async with self._session.post(path, json=body) as response:
            if response.status != 200:
                raise ServerError(f"{path}: {await response.text()}")
            return await response.json()

    async def counters(self) -> dict[str, float]:
        """vLLM's counters by name, from /metrics."""
        async with self._session.get("/metrics/") as response:
            return read_counters(await response.text())

    async def ask(self, request: Mapping[str, Any]) -> Answer:
        """One streamed completion; `request` needs `prompt` and what limits the answer."""
        body = {"model": "model", "stream": True, "return_token_ids": True, **request}
        answer, finished = Answer(), False
        sent = time.perf_counter()
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ServerError(await response.text())
            async for line in response.content:
                came = time.perf_counter() - sent
                if not line.startswith(b"data: {"):  # blank lines, and [DONE] at the end
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise ServerError(str(chunk["error"]))
                for choice in chunk["choices"]:
                    finished |= choice.get("finish_reason") is not None
                    if choice.get("token_ids"):
                        answer.tokens += choice["token_ids"]
                        answer.arrivals.append((came, len(choice["token_ids"])))
        if not finished or not answer.tokens:
            raise ServerError("an answer ended before its last token")
        return answer

    async def ask_all(
        self, requests: Sequence[Mapping[str, Any]], batch_size: int, progress: Callable[[dict[str, Any]], None]
    ) -> list[Answer]:
        """The answers in the requests' order, `batch_size` of them in flight: a new one starts as soon as one ends."""
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(requests))

        async def one_after_another() -> None:
            for index, request in waiting:  # shared by all that are in flight
                answers[index] = await self.ask(request)
                progress({"event": "progress", "finished": len(answers)})

        await asyncio.gather(*(one_after_another() for _ in range(batch_size)))
        return [answers[index] for index in range(len(requests))]


def read_counters(text: str) -> dict[str, float]:
    """Values of vLLM's series by name, added up over their labels.

    >>> read_counters('# HELP x\\nvllm:seen_total{engine="0"} 3.0\\nvllm:seen_total{engine="1"} 1.0\\npython_x 7')
    {'vllm:seen_total': 4.0}
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0].split()[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found
