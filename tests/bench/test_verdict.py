"""Whether trees paid, and why: by hand."""

from __future__ import annotations

import pytest

from vllm_medusa.bench import verdict as module
from vllm_medusa.bench.results import Results, Run
from vllm_medusa.bench.verdict import verdict, what_would_help
from vllm_medusa.host.metrics.figures import Counts, Learnt
from vllm_medusa.row_cost import row_cost

TABLE: list[dict[str, float]] = [
    {"tokens": 1, "milliseconds": 10.0, "steps": 50},
    {"tokens": 9, "milliseconds": 30.0, "steps": 30},
    {"tokens": 64, "milliseconds": 900.0, "steps": 1},
]


def results(speed: float) -> Results:
    """Plain vLLM with 100 tokens a second; Medusa with 8 nodes a request, 1.5 tokens a step."""
    found = Results({"engine": {"medusa": {"dtype": "float32", "compiled": False}}, "environment": {}})
    for method, rate, steps, accepted, nodes in (("none", 100.0, 150, 1.0, 0.0), ("medusa", speed, 100, 1.5, 8.0)):
        found.runs.append(Run(method, "chat", 1, 0.0, 0, 1, 151, 1.0, rate, steps, accepted, nodes, 0.1, 1.0, 1.0))
    found.costs["medusa"] = TABLE
    return found


def test_what_a_row_costs_is_told_whether_trees_pay_or_not() -> None:
    cost = row_cost({1: 0.010, 9: 0.030, 64: 0.9})
    assert cost is not None and cost.share == pytest.approx(0.25)
    for speed in (150.0, 90.0):
        told = verdict(results(speed))
        assert told is not None and "each row more 2.50 ms (25 %)" in told.plain
        assert ("did not pay" in told.plain) == (speed < 100)


def test_why_they_do_not_pay_and_what_would_help() -> None:
    told = verdict(results(90.0))
    assert told is not None
    assert "chat at batch 1: 8.0 nodes a request brought 0.50 tokens more a step, for 200% of" in told.plain
    assert "compil" in told.plain.splitlines()[-1]


def test_nothing_is_said_before_costs_are_known() -> None:
    found = results(90.0)
    found.costs["medusa"] = TABLE[:1]
    assert verdict(found) is None


def test_what_would_help_is_what_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert what_would_help({"dtype": "bfloat16", "compiled": True}, {"OMP_NUM_THREADS": "4"}) == []
    assert "bfloat16" in what_would_help({"dtype": "float32", "compiled": True}, {})[0]
    assert "OMP_NUM_THREADS=4" in what_would_help({"dtype": "bfloat16", "compiled": True}, {"OMP_NUM_THREADS": "1"})[0]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert what_would_help({"dtype": "bfloat16", "compiled": True}, {}) == []  # our product serves
    monkeypatch.setenv("PATH", "/nowhere")
    assert "C++ compiler" in what_would_help({"dtype": "bfloat16", "compiled": True}, {})[0]
    assert "g++" in what_would_help({"dtype": "float32", "compiled": False}, {})[0]


def test_the_log_says_why_nothing_is_drafted() -> None:
    from vllm_medusa.host.metrics.logline import describe

    counts = Counts({1: 10}, {1: 10}, {1: 0}, 10)
    learnt = Learnt(0.1, {1: 0.010, 9: 0.030})
    assert "Trees do not pay now: each row more takes 25% of a step" in describe(counts, learnt)
    counts.drafted_nodes = {1: 80}
    assert "do not pay" not in describe(counts, learnt) and "A row more: 25% of a step" in describe(counts, learnt)
