"""The picture of a bench."""

from pathlib import Path

import pytest

from vllm_medusa.bench.picture import _lengths, check_picture, plot
from vllm_medusa.bench.results import Results, Run
from vllm_medusa.errors import MedusaError

pytest.importorskip("matplotlib")


def results(datasets: tuple[str, ...] = ("mt_bench", "gsm8k"), batches: tuple[int, ...] = (1, 4, 16)) -> Results:
    """Two methods that draft more at small batches, two rounds."""
    found = Results({})
    for dataset in datasets:
        for batch in batches:
            for number in range(2):
                for method, nodes, accepted in (("none", 0.0, 1.0), ("medusa", 8 / batch, 2.0), ("ngram", 2.0, 1.2)):
                    tokens = 4 + round(100 * batch * accepted)  # four prompts, whose steps bring a token each
                    seconds = 1.0 + 0.1 * number * (method == "medusa")
                    steps = (seconds, tokens / seconds, 100, accepted, nodes * batch)
                    found.runs.append(Run(method, dataset, batch, 0.0, number, 4, tokens, *steps, None, 1.0, 1.0))
    return found


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_every_format(tmp_path: Path, ending: str) -> None:
    plot(results(), tmp_path / "new" / f"out.{ending}")
    assert (tmp_path / "new" / f"out.{ending}").stat().st_size > 1000


@pytest.mark.parametrize("count", [1, 3, 4])
def test_any_number_of_data_sets(tmp_path: Path, count: int) -> None:
    plot(results(tuple(f"set{number}" for number in range(count))), tmp_path / "out.png")


def test_plain_vllm_alone(tmp_path: Path) -> None:
    alone = results()
    alone.runs = alone.select("none")
    plot(alone, tmp_path / "out.png")


def test_the_order_of_the_runs_does_not_show(tmp_path: Path) -> None:
    plot(results(), tmp_path / "rising.png")
    plot(results(batches=(16, 1, 4)), tmp_path / "mixed.png")
    assert (tmp_path / "rising.png").read_bytes() == (tmp_path / "mixed.png").read_bytes()


def test_lengths_are_per_request_and_step() -> None:
    assert _lengths(results(), "medusa", "gsm8k") == [(8.0, 2.0), (2.0, 2.0), (0.5, 2.0)]


def test_a_format_nobody_can_draw_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match=r"out\.gif"):
        check_picture(tmp_path / "out.gif")
