"""Prompt lookup in a served engine: the same tokens, from what the request's own text expects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import VOCAB, random_prompts

from vllm_medusa.budget import NodeBudget

pytestmark = pytest.mark.slow  # engines start


@pytest.fixture
def without_lookup(tiny_medusa):
    """Lookup off until the test ends."""
    drafting = tiny_medusa.runner.drafting
    before = drafting.settings
    drafting.settings = before.model_copy(update={"prompt_lookup": False})
    yield
    drafting.settings = before


def repetitive(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts that say one thing three times."""
    return [[*phrase, *phrase, *phrase] for phrase in random_prompts(rng, rng.integers(5, 30, count).tolist())]


def greedy(max_tokens: int = 60):
    from vllm import SamplingParams

    # The tiny model wanders; with three tokens to choose from it repeats itself.
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logit_bias={7: 40.0, 8: 40.0, 9: 40.0})


def served(engine, prompts, params):
    engine.draft_with("dynamic", 24)
    engine.runner.medusa_report(reset=True)
    tokens = engine.tokens(prompts, params)
    return tokens, engine.runner.medusa_report(reset=True)


def test_same_tokens_and_more_of_them_a_step(tiny, tiny_medusa):
    prompts, params = repetitive(np.random.default_rng(0), 12), greedy()
    tokens, report = served(tiny_medusa, prompts, params)
    assert tokens == tiny.tokens(prompts, params)
    top_k = tiny_medusa.runner.drafter.top_k
    assert len(report["accepted_by_rank"]) == top_k + 1
    assert report["accepted_by_rank"][top_k] > 0.2 * report["emitted_tokens"]  # junk heads: it is all the text's
    assert len(report["accepted_by_depth"]) > tiny_medusa.runner.drafter.heads.config.num_heads
    assert len(tiny_medusa.runner.drafting.lookups) <= len(prompts)


def test_switched_off_it_is_the_heads_alone(tiny, tiny_medusa, without_lookup):
    prompts, params = repetitive(np.random.default_rng(1), 4), greedy(24)
    tokens, report = served(tiny_medusa, prompts, params)
    assert tokens == tiny.tokens(prompts, params)
    assert len(report["drafted_by_rank"]) <= tiny_medusa.runner.drafter.top_k


def test_sampled_requests_draft_from_their_text_too(tiny, tiny_medusa):
    from vllm import SamplingParams

    prompts = repetitive(np.random.default_rng(2), 8)
    bias = {7: 40.0, 8: 40.0, 9: 40.0}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, logit_bias=bias)
    tokens, report = served(tiny_medusa, prompts, params)
    assert tokens == tiny.tokens(prompts, params)
    assert report["accepted_by_rank"][-1] > 0


def test_useless_heads_are_hardly_asked(tiny, tiny_medusa, monkeypatch):
    """Adaptive, and heads that are never right: they are asked now and then, and answers stay the same."""
    runner, asked = tiny_medusa.runner, []
    drafting = runner.drafting
    adaptive = drafting.settings.model_copy(update={"adaptive": True, "prompt_lookup": False})
    monkeypatch.setattr(drafting, "settings", adaptive)
    monkeypatch.setattr(drafting, "budget", NodeBudget(drafting.cost))
    for tokens in (1, 4, 16, 64, 128):
        drafting.cost.seed(tokens, 0.001 * tokens)
    drafting.budget.heads_cost.seed(1, 0.001)
    honest = runner.drafter.propose

    def propose(hidden: torch.Tensor, *args, **kwargs):
        asked.append(len(hidden))
        draft = honest(hidden, *args, **kwargs)
        draft.tokens[draft.tokens >= 0] = VOCAB - 1  # the end, which is never said
        return draft

    monkeypatch.setattr(runner.drafter, "propose", propose)
    tiny_medusa.draft_with("dynamic", 8)
    prompts = random_prompts(np.random.default_rng(4), [9, 17])
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, logit_bias={VOCAB - 1: -99})
    truth = tiny.tokens(prompts, params)
    assert tiny_medusa.tokens(prompts, params) == truth
    assert drafting.trusts.every.share < 0.8
    asked.clear()
    assert tiny_medusa.tokens(prompts, params) == truth
    assert 5 <= len(asked) < 40


def test_what_is_learnt_is_told_in_one_line(tiny_medusa):
    from vllm_medusa.host.statistics import in_one_line

    served(tiny_medusa, repetitive(np.random.default_rng(5), 2), greedy(12))
    report = tiny_medusa.runner.medusa_report()
    assert {"cost", "heads_cost", "trust", "lookup_odds"} <= report.keys()
    line = in_one_line(report)
    assert "tokens a step" in line and "\n" not in line and "{1: " in line
