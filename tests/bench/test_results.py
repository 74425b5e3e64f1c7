"""Figures from runs: ratios are taken round by round, and identical means identical."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_medusa.bench.report import latency_table, memory_line, table, write_json
from vllm_medusa.bench.results import Results, common_prefix, measure, percentiles

CONTRACT = {
    "method",
    "dataset",
    "batch_size",
    "temperature",
    "prompts",
    "output_tokens",
    "seconds",
    "tokens_per_second",
} | {"steps", "mean_accepted_length", "drafted_nodes_per_step", "overhead_share", "identical_to_none"}


def measurement(seconds: float, outputs: list[list[int]], steps: int, report: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "outputs": outputs,
        "steps": steps,
        "request_steps": steps - len(outputs),
        "drafted_nodes": 4 * steps if report else 0,
        "report": report,
        "first_token": [],
        "inter_token": [],
    }


@pytest.fixture
def results() -> Results:
    """Plain vLLM takes 2, 4 and 3 seconds; Medusa 1, 1 and 3, and differs in the last token of one of two prompts.

    One request at a time, the first step of each computes its prompt; behind that Medusa needs one step for two tokens.
    """
    found = Results({"engine": {}})
    plain, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 9]]
    for number, (slow, fast) in enumerate([(2.0, 1.0), (4.0, 1.0), (3.0, 3.0)]):
        where: dict[str, Any] = {"dataset": "set", "batch_size": 1, "temperature": 0.0, "round": number}
        found.runs.append(measure(measurement(slow, plain, 6, None), plain, method="none", **where))
        found.runs.append(
            measure(measurement(fast, other, 4, {"overhead_share": 0.1}), plain, method="medusa", **where)
        )
    return found


def test_run(results: Results) -> None:
    run = results.select("medusa")[0]
    assert run.output_tokens == 6
    assert run.tokens_per_second == 6.0
    assert run.mean_accepted_length == 2.0
    assert run.drafted_nodes_per_step == 4.0
    assert (run.request_steps, run.drafted_nodes_per_request) == (2.0, 8.0)
    assert run.identical_to_none == 0.5
    assert run.identical_tokens == pytest.approx(5 / 6)
    plain = results.select("none")[0]
    assert (plain.mean_accepted_length, plain.identical_to_none, plain.overhead_share) == (1.0, 1.0, None)


def test_ratio_pairs_rounds(results: Results) -> None:
    """2/1, 4/1, 3/3: not the ratio of the sums, 9/5."""
    (ratio,) = results.ratios()
    assert (ratio.min, ratio.median, ratio.max, ratio.rounds) == (1.0, 2.0, 4.0, 3)


def test_json_is_the_contract(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    write_json(results, path)
    read = json.loads(path.read_text())
    assert set(read) == {"provenance", "runs", "ratios"}
    assert all(set(run) >= CONTRACT for run in read["runs"])
    assert {"method", "min", "median", "max"} <= set(read["ratios"][0])


@pytest.mark.parametrize("width", [80, 140])
def test_table_fits(results: Results, width: int) -> None:
    console = Console(width=width, record=True, color_system=None)
    console.print(table(results))
    text = console.export_text()
    assert "2.00×" in text
    assert "83.3%" in text
    assert all(len(line) <= width for line in text.splitlines())


def test_latencies(results: Results) -> None:
    """Seconds in the run, milliseconds in the table, which only a bench of servers has."""
    assert latency_table(results) is None
    served = measurement(1.0, [[1, 2, 3]], 3, None) | {"first_token": [0.2], "inter_token": [0.03, 0.05]}
    where: dict[str, Any] = {"dataset": "set", "batch_size": 1, "temperature": 0.0, "round": 0}
    run = measure(served, [[1, 2, 3]], method="none", **where)
    assert (run.ttft_p50, run.ttft_p99, run.itl_p50) == (0.2, 0.2, pytest.approx(0.04))
    assert run.itl_p99 == pytest.approx(0.0498)
    console = Console(width=80, record=True, color_system=None)
    console.print(latency_table(Results({}, [run])))
    text = console.export_text()
    assert "Milliseconds" in text and all(cell in text for cell in ("200.0", "40.0", "49.8"))


def test_percentiles() -> None:
    assert percentiles([]) == (None, None)
    assert percentiles([3.0]) == (3.0, 3.0)
    assert percentiles([float(value) for value in range(101)]) == (50.0, 99.0)


def test_memory_line(results: Results) -> None:
    """The processes of an engine are added up; nothing is told where nothing is known."""
    assert memory_line(results) is None
    results.provenance["engine"] = {
        "none": {"peak_resident_mib": {"front end": 600.0, "Worker": 1400.0}},
        "medusa": {"peak_resident_mib": {"front end": 600.0, "Worker": 1450.0}},
    }
    assert str(memory_line(results)) == "Peak resident MiB: none 2000, medusa 2050 (+2.5%)"


@pytest.mark.parametrize(("a", "b", "count"), [([], [], 0), ([1], [1], 1), ([1, 2], [1], 1), ([1, 2, 3], [9, 2, 3], 0)])
def test_common_prefix(a: list[int], b: list[int], count: int) -> None:
    assert common_prefix(a, b) == count
