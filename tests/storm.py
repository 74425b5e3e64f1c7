"""A storm of requests on a server: good ones, ones that hang up, malformed ones, from many clients at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWER_SECONDS = 300.0
WORDS = ("river", "stone", "green", "seven", "count", "the", "light", "north", "bread", "window", "slowly", "never")
Body = dict[str, Any]

# Each breaks a good completion or chat request; what a server must answer with a status from 400 to 499.
MALFORMED: tuple[tuple[str, Callable[[Body], Body | bytes]], ...] = (
    ("temperature is a word", lambda body: body | {"temperature": "hot"}),
    ("temperature below zero", lambda body: body | {"temperature": -1.0}),
    ("top_p above one", lambda body: body | {"top_p": 3.0}),
    ("n is zero", lambda body: body | {"n": 0}),
    ("max_tokens is huge", lambda body: body | {"max_tokens": 10**9}),
    ("max_tokens below zero", lambda body: body | {"max_tokens": -5}),
    ("max_tokens is a list", lambda body: body | {"max_tokens": [8]}),
    ("another model", lambda body: body | {"model": "no-such-model"}),
    ("a regex that never closes", lambda body: body | {"structured_outputs": {"regex": "(("}}),
    ("a schema of no type", lambda body: body | {"structured_outputs": {"json": {"type": "nothing"}}}),
    ("a grammar that is none", lambda body: body | {"structured_outputs": {"grammar": "root ::= ((("}}),
    ("two grammars at once", lambda body: body | {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("a prompt that is too long", lambda body: _ask(body, "never " * 5000)),
    ("a prompt of another type", lambda body: _ask(body, {"text": 7})),
    ("no prompt", lambda body: {key: value for key, value in body.items() if key not in ("prompt", "messages")}),
    ("an empty prompt", lambda body: _ask(body, "") if "prompt" in body else body | {"messages": "none"}),
    ("stop is a number", lambda body: body | {"stop": 7}),
    ("logit_bias of no token", lambda body: body | {"logit_bias": {"a word": 1.0}}),
    ("logprobs below zero", lambda body: body | {"logprobs": -3, "top_logprobs": -3}),
    ("json cut short", lambda body: json.dumps(body).encode()[:-9]),
)


def _ask(body: Body, prompt: Any) -> Body:
    if "prompt" in body:
        return body | {"prompt": prompt}
    return body | {"messages": [{"role": "user", "content": prompt}]}


@dataclass(frozen=True)
class Request:
    """One request: `hangs_up` after that many chunks, or None; `malformed` names what is wrong with it, or None."""

    path: str
    body: Body | bytes
    hangs_up: int | None = None
    malformed: str | None = None

    @property
    def good(self) -> bool:
        return self.hangs_up is None and self.malformed is None


@dataclass
class Answer:
    """What came back: a status (of an error in a stream, too; 0: the connection broke), text, why it ended, tokens."""

    status: int
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    error: str = ""


@dataclass
class Storm:
    """`count` requests from a seed: a tenth hang up, a twentieth are malformed, the rest are good."""

    count: int
    seed: int
    longest: int = 48
    requests: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        """Make the requests."""
        rng = random.Random(self.seed)
        self.requests = [self._make(rng, number) for number in range(self.count)]

    def _make(self, rng: random.Random, number: int) -> Request:
        chat = rng.random() < 0.5
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 40)))
        body: Body = {
            "model": "model",
            "max_tokens": rng.randint(1, self.longest),
            "temperature": 0.0,
            "stream": rng.random() < 0.5,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if rng.random() < 0.4:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
        if rng.random() < 0.2:
            body |= {"stop": [rng.choice(WORDS)]}
        if rng.random() < 0.1:
            body |= {"presence_penalty": 0.7}
        if rng.random() < 0.1:
            body |= {"structured_outputs": {"choice": ["river and stone", "river and bread"]}}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if number % 10 == 3:
            endless = {"stream": True, "max_tokens": 400, "ignore_eos": True}
            kept = {key: value for key, value in body.items() if key not in ("stop", "structured_outputs")}
            return Request(path, kept | endless, hangs_up=rng.randint(1, 5))
        if number % 20 == 7:
            name, spoil = MALFORMED[(number // 20) % len(MALFORMED)]
            return Request(path, spoil(body), malformed=name)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        return Request(path, body)


async def blow(url: str, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Send every request, `clients` at a time, in order of their place; answers in the same order."""
    limits = httpx.Limits(max_connections=clients + 4)
    gate = asyncio.Semaphore(clients)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits) as client:

        async def one(request: Request) -> Answer:
            async with gate:
                try:
                    return await asyncio.wait_for(_send(client, request), ANSWER_SECONDS)
                except httpx.HTTPError as error:
                    return Answer(0, error=repr(error))

        return list(await asyncio.gather(*map(one, requests)))


async def _send(client: httpx.AsyncClient, request: Request) -> Answer:
    content = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
    headers = {"Content-Type": "application/json"}
    if isinstance(request.body, dict) and request.body.get("stream"):
        async with client.stream("POST", request.path, content=content, headers=headers) as response:
            if response.status_code != 200:
                return Answer(response.status_code, error=(await response.aread()).decode())
            return await _read_stream(response, request.hangs_up)
    response = await client.post(request.path, content=content, headers=headers)
    if response.status_code != 200:
        return Answer(response.status_code, error=response.text)
    data = response.json()
    choice = data["choices"][0]
    return Answer(200, _text(choice, "message"), choice["finish_reason"], data["usage"]["completion_tokens"])


async def _read_stream(response: httpx.Response, hangs_up: int | None) -> Answer:
    answer, chunks = Answer(200), 0
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        data = json.loads(line.removeprefix("data: "))
        if "error" in data:
            return Answer(int(data["error"].get("code") or 500), error=str(data["error"]))  # a stream begins with 200
        for choice in data["choices"]:
            answer.text += _text(choice, "delta")
            answer.finish = choice["finish_reason"] or answer.finish
        if data.get("usage"):
            answer.tokens = data["usage"]["completion_tokens"]
        chunks += 1
        if hangs_up is not None and chunks >= hangs_up:
            break  # leaving the response closes the connection
    return answer


def _text(choice: dict[str, Any], chat_key: str) -> str:
    return str(choice["text"] if "text" in choice else choice[chat_key].get("content") or "")
