"""A storm of requests on a server: good ones, ones that hang up, malformed ones, from many clients at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import numpy as np

ANSWER_SECONDS = 300.0
UNKNOWN = -9999.0  # what vLLM's server writes for a log-probability that it does not have
CLOSE = 2e-3  # of log-probabilities in float32, in batches of other sizes
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
    ("named tokens of no vocabulary", lambda body: body | {"logprobs": 1, "logprob_token_ids": [10**7]}),
    ("prompt_logprobs in a stream", lambda body: body | {"stream": True, "prompt_logprobs": 2}),
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
    """What came back.

    Attributes:
        status: of HTTP, or of an error in a stream; 0: the connection broke.
        text: of all choices.
        finish: why the first choice ended.
        tokens: that were generated.
        error: what went wrong.
        ended: why each request of the engine ended, of which one that asks for several answers brings several.
        told: log-probabilities and scores, in the order in which they are written.
    """

    status: int
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    error: str = ""
    ended: list[str] = field(default_factory=list)
    told: list[float] = field(default_factory=list, compare=False)

    def is_as(self, other: Answer) -> bool:
        """Whether two answers say the same, what they tell about it within the rounding of float32."""
        return not self.difference(other)

    def difference(self, other: Answer) -> str:
        """What plain vLLM's answer says differently; empty: nothing.

        A drawn token's log-probability that plain vLLM does not know is no difference: it loses some, too, where a
        request in the same batch names tokens (see `_told`).
        """
        for part in fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if part.compare and mine != theirs:
                return f"{part.name}: {mine!r}, the other {theirs!r}"
        if len(self.told) != len(other.told):
            return f"{len(self.told)} numbers told, by the other {len(other.told)}"
        apart = np.abs(np.subtract(self.told, other.told))
        far = np.flatnonzero(apart > CLOSE)
        pairs = [(int(place), self.told[place], other.told[place]) for place in far if other.told[place] != UNKNOWN]
        return f"told differently, of {len(apart)} numbers: {pairs}" if pairs else ""


@dataclass
class Storm:
    """`count` requests from a seed: a tenth hang up, a twentieth are malformed, the rest are good.

    A third of the good ones want to know more than a text: log-probabilities, of named tokens too, of the prompt,
    several answers, scores.
    """

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
        if rng.random() < 0.08:
            return self._scoring(rng, text)
        if rng.random() < 0.4:
            body |= self._shown(rng, body, chat=chat)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        return Request(path, body)

    def _shown(self, rng: random.Random, body: Body, *, chat: bool) -> Body:
        """What else is asked for. Named tokens are few enough for any tokenizer."""
        shown: Body = {}
        kind = rng.choice(["likeliest", "likeliest", "named", "named", "none"])
        named = rng.sample(range(3, 250), rng.randint(1, 5))
        if kind != "none":
            most = rng.randint(0, 5) if kind == "likeliest" else len(named)
            shown |= {"logprobs": True, "top_logprobs": most} if chat else {"logprobs": most}
        if kind == "named":
            shown |= {"logprob_token_ids": named}
        if rng.random() < 0.4 and not body["stream"]:
            shown |= {"prompt_logprobs": rng.randint(0, 4)}
        if rng.random() < 0.3 and body["temperature"]:
            shown |= {"n": 2}
        if rng.random() < 0.3 and not chat and kind != "named":
            shown |= {"echo": True}
        if rng.random() < 0.3:
            shown |= {"return_token_ids": True}
        return shown

    def _scoring(self, rng: random.Random, text: str) -> Request:
        items = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        labels = rng.sample(range(3, 250), rng.randint(2, 5))
        body = {"model": "model", "query": text, "items": items, "label_token_ids": labels}
        return Request("/generative_scoring", body | {"apply_softmax": rng.random() < 0.5})


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
            return await _read_stream(response, request.body, request.hangs_up)
    response = await client.post(request.path, content=content, headers=headers)
    if response.status_code != 200:
        return Answer(response.status_code, error=response.text)
    data = response.json()
    tokens = data["usage"]["completion_tokens"]
    if "choices" not in data:
        scores = [item["score"] for item in data["data"]]
        return Answer(200, finish="length", tokens=tokens, ended=["length"] * len(scores), told=scores)
    ended = [choice["finish_reason"] for choice in data["choices"]]
    text = "".join(_text(choice, "message") for choice in data["choices"])
    told = _prompt_told(data.get("prompt_logprobs"))
    for choice in data["choices"]:
        told += [*_told(choice, request.body), *_prompt_told(choice.get("prompt_logprobs"))]
    return Answer(200, text, ended[0], tokens, ended=ended, told=told)


def _told(choice: dict[str, Any], body: Any) -> list[float]:
    """Log-probabilities of a choice's tokens, and of named ones.

    Not those of the likeliest beside them: vLLM 0.32 itself shows others as long as a request that names some is in the
    same batch (`host/v1/logprobs.py`).
    """
    shown = choice.get("logprobs")
    if not shown:
        return []
    if "content" in shown:
        places = [(place["logprob"], [top["logprob"] for top in place["top_logprobs"]]) for place in shown["content"]]
    else:
        tops = shown["top_logprobs"] or [None] * len(shown["tokens"])
        places = [
            (value or 0.0, list((top or {}).values())) for value, top in zip(shown["token_logprobs"], tops, strict=True)
        ]
    named = "logprob_token_ids" in body
    return [value for drawn, tops in places for value in (drawn, *(sorted(tops) if named else ()))]


def _prompt_told(places: Any) -> list[float]:
    """Log-probabilities of a prompt's tokens, place by place, in order of size: equals change places."""
    return [value for place in places or () for value in sorted(top["logprob"] for top in (place or {}).values())]


async def _read_stream(response: httpx.Response, body: Body, hangs_up: int | None) -> Answer:
    answer, chunks = Answer(200), 0
    texts: dict[int, str] = {}
    told: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        data = json.loads(line.removeprefix("data: "))
        if "error" in data:
            return Answer(int(data["error"].get("code") or 500), error=str(data["error"]))  # a stream begins with 200
        for choice in data["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + _text(choice, "delta")
            told.setdefault(choice["index"], []).extend(_told(choice, body))
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        if data.get("usage"):
            answer.tokens = data["usage"]["completion_tokens"]
        chunks += 1
        if hangs_up is not None and chunks >= hangs_up:
            break  # leaving the response closes the connection
    answer.text = "".join(text for _, text in sorted(texts.items()))
    answer.told = [value for _, values in sorted(told.items()) for value in values]
    answer.ended = [reason for _, reason in sorted(reasons.items())]
    answer.finish = reasons.get(0)
    return answer


def _text(choice: dict[str, Any], chat_key: str) -> str:
    return str(choice["text"] if "text" in choice else choice[chat_key].get("content") or "")
