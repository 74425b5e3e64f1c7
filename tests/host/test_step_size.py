"""Steps that compute prompts beside drafts have few sizes, and lose nothing by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import Oracle, random_prompts, random_tree
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.host import scheduler as host_scheduler
from vllm_medusa.host.step_size import EVEN, even_out


def plan(prompts: list[int], drafts: list[int]) -> SimpleNamespace:
    """A step that computes prompt pieces of the given sizes beside requests with so many drafted nodes."""
    scheduled = {f"prompt {place}": size for place, size in enumerate(prompts)}
    scheduled |= {f"request {place}": 1 + size for place, size in enumerate(drafts)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={
            f"request {place}": list(range(size)) for place, size in enumerate(drafts) if size
        },
    )


@given(st.lists(st.integers(2, 300), max_size=3), st.lists(st.integers(0, 40), max_size=8))
def test_prompts_beside_drafts_make_an_even_size(prompts: list[int], drafts: list[int]) -> None:
    step, before = plan(prompts, drafts), plan(prompts, drafts)
    even_out(step)
    if not prompts or before.total_num_scheduled_tokens % EVEN > sum(drafts):
        assert step == before
        return
    assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
    assert step.total_num_scheduled_tokens == before.total_num_scheduled_tokens // EVEN * EVEN
    for name, size in step.num_scheduled_tokens.items():
        tokens = step.scheduled_spec_decode_tokens.get(name, [])
        kept = before.scheduled_spec_decode_tokens.get(name, [])
        assert tokens == kept[: len(tokens)] and size == before.num_scheduled_tokens[name] - len(kept) + len(tokens)
    assert all(step.scheduled_spec_decode_tokens.values())


def test_the_longest_drafts_are_cut() -> None:
    step = plan([16], [2, 14, 12])  # 47 tokens: 15 are over
    even_out(step)
    assert sorted(len(tokens) for tokens in step.scheduled_spec_decode_tokens.values()) == [2, 5, 6]


@pytest.mark.slow
def test_tokens_stay_the_same(tiny: Any, tiny_medusa: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin while others decode: their steps have even sizes, and every token is plain vLLM's."""
    from vllm import SamplingParams

    core = tiny_medusa.llm.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core.scheduler, "_evens_out", True)
    cut = []

    def watched(step: Any) -> None:
        before = step.total_num_scheduled_tokens
        even_out(step)
        cut.append((before, step.total_num_scheduled_tokens))

    monkeypatch.setattr(host_scheduler, "even_out", watched)
    rng = np.random.default_rng(21)
    prompts = random_prompts(rng, rng.integers(3, 90, 40).tolist())
    params = [
        SamplingParams(temperature=0.0 if place % 2 else 0.8, seed=place, max_tokens=int(length), ignore_eos=True)
        for place, length in enumerate(rng.integers(4, 60, len(prompts)))
    ]
    truth = tiny.tokens(prompts, params)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, truth, strict=True)}
    drafting(Oracle(tiny_medusa, answers, lambda rng: random_tree(rng, 24), rng=rng))
    assert tiny_medusa.tokens(prompts, params) == truth
    even = [after for before, after in cut if after < before]
    assert len(even) >= 10 and all(size % EVEN == 0 for size in even)
