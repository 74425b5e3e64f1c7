"""The guard: loud once for heads that are never right, silent for others."""

from __future__ import annotations

import logging

import pytest
from engines import random_prompts

from vllm_medusa.host.guard import NEAR_ZERO, WATCHED_STEPS, AcceptanceGuard


def watched(caplog, share: float, steps: int) -> list[str]:
    logger = logging.getLogger("test-guard")
    guard = AcceptanceGuard("heads/", logger)
    with caplog.at_level(logging.WARNING):
        for step in range(steps // 10):
            guard.watch(10, round(10 * share * (step + 1)) - round(10 * share * step))
    return [record.getMessage() for record in caplog.records if record.name == "test-guard"]


def test_one_warning_that_names_causes(caplog):
    (message,) = watched(caplog, NEAR_ZERO / 4, 5 * WATCHED_STEPS)
    assert "0.5 %" in message and "another model" in message and "final norm" in message and "heads/" in message


@pytest.mark.parametrize(("share", "steps"), [(0.1, 5 * WATCHED_STEPS), (0.0, WATCHED_STEPS - 10)])
def test_silence(caplog, share, steps):
    assert watched(caplog, share, steps) == []


@pytest.mark.slow
def test_a_served_engine_with_junk_heads_warns_once(tiny_medusa, caplog):
    import numpy as np
    from vllm import SamplingParams

    tiny_medusa.draft_with("dynamic", 1)
    runner = tiny_medusa.runner
    runner.guard = AcceptanceGuard("junk/", logging.getLogger("test-guard"))
    prompts = random_prompts(np.random.default_rng(2), [8] * 16)
    with caplog.at_level(logging.WARNING):
        tiny_medusa.answer(prompts, SamplingParams(temperature=2.0, max_tokens=90, ignore_eos=True))
    assert runner.guard.drafted >= WATCHED_STEPS
    assert runner.guard.accepted < 0.1 * runner.guard.drafted
    said = [record for record in caplog.records if record.name == "test-guard"]
    assert len(said) == (runner.guard.accepted < NEAR_ZERO * runner.guard.drafted)
