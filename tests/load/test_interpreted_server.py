"""A server on Model Runner V2, by Triton's interpreter, in the same storm: MEDUSA_STORM=1 or MEDUSA_LONG=1."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from servers import serve, tiny_speaker
from storm import Storm, blow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(not any(os.environ.get(n) for n in ("MEDUSA_LONG", "MEDUSA_STORM")), reason="minutes"),
]
STORM = Storm(60, seed=29, longest=12)


def test_a_storm_of_sixty(tmp_path: Path) -> None:
    """Good requests are answered as by plain vLLM on the same runner, bad ones refused, and the engine lives on."""
    model, heads = map(str, tiny_speaker(tmp_path))
    answers = {}
    for name, given in (("plain", None), ("medusa", heads)):
        folder = tmp_path / name
        folder.mkdir()
        with serve(model, given, folder, blocks=60, interpreted=True, seconds=900) as server:
            answers[name] = asyncio.run(blow(server.url, STORM.requests, clients=12))
            server.wait_until_idle()
            again = asyncio.run(blow(server.url, [r for r in STORM.requests if r.good][:2], clients=2))
            assert [answer.status for answer in again] == [200, 200]
            finished = server.samples("vllm_medusa:request_steps_total", "batch_size")
            assert (sum(finished.values()) > 0) == (given is not None)
    compared = 0
    for number, (request, ours, plain) in enumerate(
        zip(STORM.requests, answers["medusa"], answers["plain"], strict=True)
    ):
        if request.good:
            assert plain.status == 200, (number, plain)
            assert ours.is_as(plain), (ours.difference(plain), number, request)
            compared += ours.tokens
        elif request.malformed is not None:
            assert 400 <= ours.status <= 499 and ours.status == plain.status, (request, ours, plain)
    assert compared > 100
    print(f"{sum(r.good for r in STORM.requests)} good requests, {compared} tokens compared")
