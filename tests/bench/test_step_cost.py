"""What the learnt step times leave room for."""

import pytest
from rich.console import Console

from vllm_medusa.bench.results import Results, Run
from vllm_medusa.bench.step_cost import allowances, cost_json, cost_table, nodes_within, read_cost
from vllm_medusa.cost import StepCost

# Flat up to nine tokens, then a millisecond each.
TABLE: list[dict[str, float]] = [
    {"tokens": 1, "milliseconds": 10.0, "steps": 50},
    {"tokens": 9, "milliseconds": 10.4, "steps": 3},
    {"tokens": 20, "milliseconds": 21.4, "steps": 1},
]


def run(batch_size: int, accepted: float, drafted: float) -> Run:
    """100 steps; every request is in each of them. The first token of the one prompt is of no decode step."""
    tokens = 1 + round(100 * batch_size * accepted)
    return Run(
        "medusa", "set", batch_size, 0.0, 0, 1, tokens, 1.0, tokens, 100, accepted, drafted * batch_size, 0.1, 1.0, 1.0
    )


@pytest.fixture
def results() -> Results:
    return Results({}, runs=[run(1, 2.0, 8.0), run(4, 1.5, 1.25)], costs={"medusa": TABLE})


def test_nodes_by_batch_size(results: Results) -> None:
    """One request: nine tokens are free, 18 cost twice as much. Four: one node each is free, three lose."""
    one, four = allowances(TABLE, results.runs)
    assert (one.batch_size, one.accepted_length, one.drafted) == (1, 2.0, pytest.approx(8.0))
    assert (one.free, one.break_even) == (8, 17)
    assert (four.batch_size, four.drafted) == (4, pytest.approx(1.25))
    assert (four.free, four.break_even) == (1, 2)


def test_no_growth_means_no_limit() -> None:
    assert nodes_within(StepCost.from_points([(1, 0.01), (9, 0.01)]), 1, 1.05) == 128


def test_the_model_is_the_engines(results: Results) -> None:
    assert [row["milliseconds"] for row in read_cost(TABLE).table()] == [10.0, 10.4, 21.4]


def test_unknown_before_two_sizes(results: Results) -> None:
    assert allowances(TABLE[:1], results.runs) == []
    assert allowances([], results.runs) == []


def test_json(results: Results) -> None:
    found = cost_json(results)["medusa"]
    assert found["steps"] == TABLE
    assert [row["free"] for row in found["nodes"]] == [8, 1]


def test_table_fits(results: Results) -> None:
    console = Console(width=80, record=True, color_system=None)
    console.print(cost_table(results, "medusa"))
    text = console.export_text()
    assert "break-even" in text and "21.4" in text and "2.14×" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_nothing_learnt(results: Results) -> None:
    console = Console(width=100, record=True, color_system=None)
    console.print(cost_table(results, "medusa-static"))
    assert "has not learnt" in console.export_text()
