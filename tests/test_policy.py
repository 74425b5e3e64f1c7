"""The whole policy in a simulation (`simulated.py`): bad phases, mixed requests, long texts, rows that are not free."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated import README, ROW_BY_ROW, Request, Serving, Step, nodes, rate


def steps_until_back(again: list[Step], before: float) -> int:
    """Steps after which twenty on end draft nine tenths of `before` on average."""
    means = np.convolve([sum(step.nodes) for step in again], np.ones(20) / 20, "valid")
    assert (means >= 0.9 * before).any(), "they never do"
    return int(np.argmax(means >= 0.9 * before))


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_heads_that_are_right_again_are_drafted_from_again(batch: int) -> None:
    """500 good steps, 2,000 bad ones, good ones: the phases in which drafting used to end for good."""
    serving = Serving(README, [Request() for _ in range(batch)], seed=batch)
    before = nodes(serving.steps(500)[-300:])
    serving.requests = [Request(kept=0.02) for _ in range(batch)]
    bad = serving.steps(2000)
    assert nodes(bad[-1000:]) < 0.05 * before
    assert rate(bad[-1500:]) > 0.975 * batch / serving.true(batch)
    serving.requests = [Request() for _ in range(batch)]
    again = serving.steps(700)
    back = steps_until_back(again, before)
    assert back <= 200 or sum(step.seconds for step in again[:back]) <= 5.0
    assert nodes(again[300:]) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_a_slow_minute_leaves_nothing_behind(batch: int) -> None:
    """Others hog the cores: steps take two to four times as long, large ones more, none like the one before."""
    serving = Serving(README, [Request() for _ in range(batch)], seed=batch)
    usual = serving.steps(1500)[-1300:]
    serving.slow = lambda rng, tokens: 1.5 + rng.exponential(1.0) + tokens / 400
    serving.steps(1000)
    serving.slow = lambda rng, tokens: 1.0
    again = serving.steps(1500)
    assert nodes(again[200:400]) > 0.7 * nodes(usual)  # what is best is flat: these bring nearly as much
    assert rate(again[200:]) == pytest.approx(rate(usual), rel=0.08)


@pytest.mark.parametrize(("good", "bad"), [(4, 4), (2, 6), (1, 15), (16, 16)])
@pytest.mark.parametrize("temperature", [1.8, 0.0])
def test_each_request_gets_what_it_deserves(good: int, bad: int, temperature: float) -> None:
    """All promise as much, some keep it: close to what would be served if that were known, better than one trust."""
    rates, drafted = {}, {}
    for believe in ("each", "all", "truth"):
        requests = [Request()] * good + [Request(kept=0.05, temperature=temperature)] * bad
        serving = Serving(README, requests, seed=good, believe=believe)
        serving.steps(200)
        served = serving.steps(500)
        rates[believe] = rate(served)
        drafted[believe] = np.mean([step.nodes for step in served], axis=0)
    assert rates["each"] > 0.955 * rates["truth"] and rates["each"] > 1.02 * rates["all"]
    assert drafted["each"][:good].mean() > 4.0 * drafted["each"][good:].mean()


def test_one_request_s_bad_passage_is_forgotten() -> None:
    """A burst of other text in one of eight requests: it loses its nodes, and gets them back."""
    serving = Serving(README, [Request() for _ in range(8)], seed=3)

    def own(steps: list[Step]) -> float:
        return float(np.mean([step.nodes[0] for step in steps]))

    before = own(serving.steps(400)[-200:])
    serving.requests[0] = Request(kept=0.02)
    assert own(serving.steps(400)[-300:]) < 0.5 * before
    serving.requests[0] = Request()
    again = serving.steps(400)
    assert own(again[200:]) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_little_is_drafted_where_rows_are_not_free(batch: int) -> None:
    """A machine that computes row by row: nothing or a node or two, and never much slower than plain decoding."""
    serving = Serving(ROW_BY_ROW, [Request() for _ in range(batch)], seed=batch)
    served = serving.steps(1000)
    assert nodes(served[200:]) <= 2.7 * batch
    assert rate(served[200:]) > 0.96 * batch / serving.true(batch)
    serving.requests = [Request(kept=0.02) for _ in range(batch)]
    serving.steps(300)
    assert rate(serving.steps(1000)) > 0.975 * batch / serving.true(batch)


@pytest.mark.parametrize("by_node_key", [1e-7, 6e-7, 2.4e-6])
@pytest.mark.parametrize("points", [README, ROW_BY_ROW])
def test_long_texts(points: tuple[tuple[int, float], ...], by_node_key: float) -> None:
    """A text of 7,000 tokens that repeats itself, alone and beside short ones: never below 0.95 of plain decoding."""
    serving = Serving(points, [], seed=1, by_key=1.2e-6, by_node_key=by_node_key)
    short, long = Request(context=300), Request(certain=0.9, context=7000)
    curves = []
    for requests in ([short], [long], [long] + [replace(short) for _ in range(7)], [short] * 4, [long]):
        serving.requests = requests
        served = serving.steps(400)
        keys = sum(request.context for request in requests)
        plain = len(requests) / (serving.true(len(requests)) + serving.by_key * keys)
        assert rate(served[:50]) > 0.95 * plain and rate(served) > 0.95 * plain
        curves.append(float(serving.cost.seconds(8)))
    assert curves == pytest.approx([serving.true(8)] * len(curves), rel=0.1)
