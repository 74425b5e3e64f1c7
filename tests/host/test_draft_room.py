"""Drafts come last: no request waits longer for its tokens than twice plain vLLM's steps, whatever the tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling import Coming, make_scheduler, play

from vllm_medusa.host.draft_room import even_level


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 200))
def test_an_even_level_uses_the_room_and_no_more(sizes: list[int], room: int) -> None:
    level = even_level(sizes, room)

    def used(most: int) -> int:
        return sum(min(size, most) for size in sizes)

    assert used(level) <= room
    assert level == max(sizes) or used(level + 1) > room


def waits(said: Sequence[int], arrives: int) -> list[int]:
    """Steps until each token, from the one before or from the request's arrival."""
    return [now - before for before, now in zip([arrives - 1, *said], said, strict=False)]


def both(
    model: Path, heads: Path, coming: Sequence[Coming], *, nodes: int, asynchronous: bool, blocks: int, **limits: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Steps in which plain vLLM and trees gave each request a token."""
    options = {"asynchronous": asynchronous, "blocks": blocks, **limits}
    plain = play(make_scheduler(model, None, **options), coming)
    return plain, play(make_scheduler(model, heads, nodes=nodes, **options), coming, nodes)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("running", [4, 6])
def test_a_short_prompt_is_answered_at_once(
    tiny_model: Path, tiny_heads: Path, running: int, asynchronous: bool
) -> None:
    """31 nodes each, 128 tokens a step: the running requests' trees would take all of them."""
    coming = [Coming(0, 4, 100)] * running + [Coming(8, 3, 5)]
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    plain, trees = both(tiny_model, tiny_heads, coming, nodes=31, asynchronous=asynchronous, blocks=400, **limits)
    assert trees == plain


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("over", [-1, 0, 1, 2])
def test_seats_times_rows_about_the_budget(tiny_model: Path, tiny_heads: Path, over: int, asynchronous: bool) -> None:
    """Four seats of 32 rows, and a few tokens more or fewer than they want."""
    coming = [Coming(place, 3, 40) for place in range(7)]
    limits = {"max_num_batched_tokens": 4 * 32 - over, "max_num_seqs": 4}
    plain, trees = both(tiny_model, tiny_heads, coming, nodes=31, asynchronous=asynchronous, blocks=400, **limits)
    assert trees == plain


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_in_pieces_keeps_nobody_waiting(tiny_model: Path, tiny_heads: Path, asynchronous: bool) -> None:
    """A long prompt is computed in pieces, and a short one that came later decodes behind it."""
    coming = [Coming(0, 4, 80), Coming(0, 4, 80), Coming(5, 400, 10), Coming(6, 4, 60), Coming(7, 4, 60)]
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "long_prefill_token_threshold": 16}
    plain, trees = both(tiny_model, tiny_heads, coming, nodes=31, asynchronous=asynchronous, blocks=400, **limits)
    for request, before, now in zip(coming, plain, trees, strict=True):
        assert max(waits(now, request.arrives)) <= 2 * max(waits(before, request.arrives))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_blocks_are_not_for_drafts(tiny_model: Path, tiny_heads: Path, asynchronous: bool) -> None:
    """Three requests fill the cache to its last block as they end; a draft's block would throw one of them out."""
    coming = [Coming(0, 20, 28)] * 3
    limits = {"max_num_batched_tokens": 256, "max_num_seqs": 4}
    plain, trees = both(tiny_model, tiny_heads, coming, nodes=31, asynchronous=asynchronous, blocks=10, **limits)
    assert trees == plain


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_twice_as_long(tiny_model: Path, tiny_heads: Path, seed: int, asynchronous: bool) -> None:
    """Any arrivals, budgets, thresholds, trees: first tokens, each later one and the end."""
    rng = np.random.default_rng([17, seed])
    nodes = int(rng.choice([1, 7, 31, 63, 127]))
    seats = int(rng.integers(2, 9))
    budget = int(rng.choice([seats + 1, 32, 64, 128, seats * (1 + nodes) - 1])) + seats
    coming = [
        Coming(int(arrives), int(rng.choice([1, 3, 20, 90, 300])), int(rng.integers(1, 60)))
        for arrives in sorted(rng.integers(0, 60, 14))
    ]
    limits = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": seats,
        "long_prefill_token_threshold": int(rng.choice([0, 0, 8, 24])),
    }
    plain, trees = both(tiny_model, tiny_heads, coming, nodes=nodes, asynchronous=asynchronous, blocks=600, **limits)
    for request, before, now in zip(coming, plain, trees, strict=True):
        assert len(now) == len(before) == request.tokens
        assert now[0] - request.arrives + 1 <= 2 * (before[0] - request.arrives + 1)
        assert now[-1] - request.arrives + 1 <= 2 * (before[-1] - request.arrives + 1)
        slowest = max(waits(before, request.arrives)[1:], default=1)
        assert max(waits(now, request.arrives)[1:], default=1) <= 2 * slowest


@pytest.mark.slow
def test_in_an_engine(tiny: Any, tiny_medusa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests with trees of 128 nodes, 128 tokens a step: a seventh says its first token in the step it comes."""
    from vllm import SamplingParams

    prompts = [[5 + place, 9, 12] for place in range(7)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = tiny_medusa.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 128)
    said: dict[str, list[int]] = {}

    def step() -> set[str]:
        before = {name: len(tokens) for name, tokens in said.items()}
        said.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
        return {name for name, tokens in said.items() if len(tokens) > before.get(name, 0)}

    for place, prompt in enumerate(prompts[:6]):
        engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        assert step() == {"0", "1", "2", "3", "4", "5"}
    engine.add_request("6", {"prompt_token_ids": prompts[6]}, params)
    assert step() == {"0", "1", "2", "3", "4", "5", "6"}
    while engine.has_unfinished_requests():
        step()
    assert [said[str(place)] for place in range(7)] == tiny.tokens(prompts, params)
