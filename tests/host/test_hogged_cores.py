"""An engine whose cores are hogged for a while drafts afterwards as before. Real heads, a real model, real hogs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from engines import start

from vllm_medusa.defaults import bundled_heads, default_model

LONG = bool(os.environ.get("MEDUSA_LONG"))
HOGGED = 60.0 if LONG else 15.0  # seconds
PROMPTS = [
    "Write a Python function that reverses a list, and one that sorts it.",
    "List the planets of the solar system, one on each line, twice.",
]


@pytest.mark.slow
def test_nothing_is_left_of_a_hogged_minute() -> None:
    """One process for each core; the accepted length afterwards is within 5 % of that before, to the same prompts."""
    from vllm import SamplingParams

    engine = start(
        default_model(),
        bundled_heads(),
        max_model_len=512,
        block_size=32,
        skip_tokenizer_init=False,
        medusa={"num_speculative_tokens": 16},
    )
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)

    def served(more: Callable[[int], bool]) -> dict[str, Any]:
        engine.runner.medusa_report(reset=True)
        rounds = 0
        while more(rounds):
            engine.llm.generate(PROMPTS, params, use_tqdm=False)
            rounds += 1
        report: dict[str, Any] = engine.runner.medusa_report()
        return report

    served(lambda rounds: rounds < 2)  # warm
    before = served(lambda rounds: rounds < 3)
    code = f"import time\nend = time.time() + {2 * HOGGED}\nwhile time.time() < end: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        end = time.monotonic() + HOGGED
        served(lambda rounds: time.monotonic() < end)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    end = time.monotonic() + 5.0
    served(lambda rounds: time.monotonic() < end)
    after = served(lambda rounds: rounds < 3)
    print({key: (before[key], after[key]) for key in ("mean_accepted_length", "trust", "steps", "drafted_nodes")})
    assert after["mean_accepted_length"] > 0.95 * before["mean_accepted_length"]
