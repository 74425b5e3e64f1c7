"""What serving on Model Runner V2 teaches, from figures written by hand; its clock, with events that are scripted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_medusa.host.v2.clock import StageClock
from vllm_medusa.host.v2.learning import TRY_STEPS, Learning, StepSize

CPU = torch.device("cpu")


def learning(nodes: int = 8, most: int = 16) -> Learning:
    """A machine on which four tokens a step cost as much as one; heads that are right half the time."""
    found = Learning()
    for tokens, seconds in ((1, 0.010), (4, 0.010), (8, 0.020), (64, 0.160), (256, 0.640)):
        found.cost.seed(tokens, seconds)
    for requests in (1, 16):
        found.heads_cost.seed(requests, 0.0005)
    found.choose_from([0.5, 0.25, 0.125], nodes, most)
    return found


def test_nodes_are_chosen_by_cost_and_reach() -> None:
    assert learning().widths == [2, 2, 2, *[0] * 14]


def test_steps_that_got_cheaper_bring_nodes() -> None:
    found = learning()
    for _ in range(400):
        for tokens in (1, 4, 8, 16, 32):
            found.learn_step(StepSize(tokens, 4), {"step": 0.011, "propose": 0.001})
    found.choose()
    assert found._best is not None and found._best[4] == 4, "as many nodes as were ever right"
    assert found.learnt().step_seconds[8] == pytest.approx(0.010, rel=0.05)
    assert found.learnt().heads_seconds[4] == pytest.approx(0.001, rel=0.2)


def test_a_step_that_drafted_nothing_says_nothing_of_the_heads() -> None:
    found = learning()
    before = found.heads_cost.table()
    found.learn_step(StepSize(4, 4), {"step": 0.011})
    assert found.heads_cost.table() == before


def serve(found: Learning, steps: int, requests: int, accepts: bool) -> tuple[list[int], float, float]:
    """Serve as `MedusaModelRunnerV2` does: nodes of each step, seconds of all, and what of them plain steps save."""
    nodes, seconds, extra, due = [], 0.0, 0.0, 0.0
    walks = [0.0, [0] * 8, [0] * 8]
    for _ in range(steps):
        assert found.widths is not None
        width = found.widths[requests]
        tokens = requests * (1 + width)
        own = max(0.010, 0.0025 * tokens)
        found.learn_step(
            StepSize(tokens, requests), {"step": own + 0.0005 * (width > 0), "propose": 0.0005 * (width > 0)}
        )
        nodes.append(width)
        seconds += own + 0.0005 * (width > 0)
        extra += (own + 0.0005 - max(0.010, 0.0025 * requests)) * (width > 0)
        for node in range(width):
            walks[1][node] += requests * accepts * (node < 2)
            walks[2][node] += requests
        walks[0] += 0.875 * requests * (width > 0)
        if seconds >= due:
            due = seconds + 0.25
            found.learn_walks(*walks)
            walks = [0.0, [0] * 8, [0] * 8]
            found.choose()
        else:
            found.ends_try()
    return nodes, seconds, extra


@pytest.mark.parametrize("requests", [1, 2])
def test_nodes_that_are_never_reached_are_tried_within_a_hundredth_and_come_back(requests: int) -> None:
    """After two thousand steps of useless heads, within 200 steps or five seconds."""
    found = learning()
    good, _, _ = serve(found, 500, requests, accepts=True)
    assert good[-1] >= 2
    serve(found, 1500, requests, accepts=False)
    bad, seconds, extra = serve(found, 6000, requests, accepts=False)
    assert any(bad) and found.trust.share < 0.3
    assert extra < 0.01 * seconds
    again, _, _ = serve(found, max(200, int(5.0 / 0.012)), requests, accepts=True)
    assert sum(again[-50:]) >= 0.9 * sum(good[-50:])


def test_a_try_lasts_a_few_steps() -> None:
    found = learning()
    found.learn_walks(100.0, [0] * 8, [1000] * 8)
    for _ in range(2000):
        found.learn_step(StepSize(4, 4), {"step": 0.010})
    found.choose()
    assert found.widths == [2] * 5 + [0] * 12, "the smallest number of nodes, for as many requests as there are"
    for _ in range(TRY_STEPS):
        assert not found.ends_try()
        found.learn_step(StepSize(12, 4), {"step": 0.030, "propose": 0.0005})
    assert found.ends_try() and found.widths == [0] * 17
    assert not found.ends_try()


def test_a_user_s_own_numbers_stay() -> None:
    found = Learning()
    found.learn_walks(10.0, [5, 0], [10, 10])
    found.choose()
    assert found.widths is None and found.trust.share == pytest.approx(37 / 42)


def test_stages_are_parts_of_a_step() -> None:
    clock: StageClock[str] = StageClock(CPU)
    clock.begin()
    for stage, seconds in (("forward", 0.02), ("walk", 0.01), ("", 0.02), ("walk", 0.01)):
        time.sleep(seconds)
        clock.mark(stage)
    clock.end("a step")
    ((about, seconds),) = clock.finished()
    assert about == "a step" and list(clock.finished()) == []
    assert seconds.keys() == {"step", "forward", "walk"}
    assert seconds["forward"] >= 0.02 and seconds["walk"] >= 0.02
    assert seconds["step"] - seconds["forward"] - seconds["walk"] >= 0.02


def test_steps_that_tell_nothing_are_forgotten() -> None:
    clock: StageClock[str] = StageClock(CPU)
    clock.mark("forward")  # a dry run: no step has begun
    clock.end("a dry run")
    clock.begin()
    clock.end(None)
    clock.begin()  # and never ended
    clock.begin()
    clock.end("a step")
    assert [about for about, _ in clock.finished()] == ["a step"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Events as a device has them, each a millisecond behind the one before; they pass when a test says so."""
    made: list[Any] = []

    class Event:
        passed = False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = float(len(made))
            made.append(self)

        def record(self, stream: Any) -> None:
            assert stream == "the current stream"

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, after: Any) -> float:
            assert self.passed and after.passed, "reading it would wait"
            return float(after.at - self.at)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, current_stream=lambda _: "the current stream"))
    yield made


def test_events_are_read_once_they_have_passed(events: list[Any]) -> None:
    clock: StageClock[int] = StageClock(torch.device("cuda"))
    for step in range(2):
        clock.begin()
        clock.mark("forward")
        clock.end(step)
    assert list(clock.finished()) == []
    for event in events[:3]:
        event.passed = True
    assert list(clock.finished()) == [(0, {"step": 0.002, "forward": 0.001})]
    assert list(clock.finished()) == []
    for event in events[3:]:
        event.passed = True
    assert [about for about, _ in clock.finished()] == [1]
