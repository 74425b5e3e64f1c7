"""docs/gpu.md: its tables are what the code prints, its figures in words too, and the code counts what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.fixture
def step(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_step.py."""
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import gpu_step

    return gpu_step


def tables(text: str) -> list[str]:
    return re.findall(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)


def test_the_tables_are_what_the_code_prints(page: str, repository: Path) -> None:
    command = [sys.executable, "benchmarks/predict_gpu.py"]
    printed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True, timeout=120).stdout
    wanted, shown = tables(printed), tables(page)
    assert len(wanted) == 10
    missing = [table for table in wanted if table not in shown]
    assert missing == [], "python benchmarks/predict_gpu.py --write, then look at the figures in words"
    (told,) = [table for table in shown if table not in wanted]
    assert told.startswith("| | checked | not checked |"), "a table that no code prints"


def test_figures_in_words(page: str, step: ModuleType) -> None:
    page = page.replace("\n", " ")
    h100 = step.GPUS[1]
    one, many = (step.predict(h100, batch, 1024).speedup for batch in (1, 128))
    assert f"{one:.2f} times plain vLLM's speed on an H100 for one request at a time, {many:.2f} times for 128" in page
    rows = []
    for gpu in step.GPUS:
        limits = (step.step_parts(1, rows, 1024)["matrix products"] for rows in range(1, 1000))
        ratio = gpu.peak * step.BASE.peak_share / (gpu.bandwidth * step.BASE.bandwidth_share)
        rows.append(next(n for n, (moved, work) in enumerate(limits, start=1) if work > moved * ratio))
    told = "an A100 that ends at {} rows by these assumptions, on an H100 at {}, on an H200 at {}"
    assert told.format(*rows) in page
    assert [-(-limit // 64) for limit in rows] == [3, 5, 4] and "passes that with three to five requests" in page
    shares = f"reaches {step.BASE.bandwidth_share:.2f} of the data sheet's bandwidth"
    assert shares in page and f"reach {step.BASE.peak_share:.2f} of the peak" in page
    bandwidths, peaks = ([getattr(gpu, name) / 1e12 for gpu in step.GPUS] for name in ("bandwidth", "peak"))
    assert "{:.3f}, {:.2f} and {:.1f} TB/s; {:.0f}, {:.0f} and {:.0f} dense".format(*bandwidths, *peaks) in page
    assert f"commit take {1e3 * step.BASE.extra:.1f} ms a step" in page


def test_the_model_has_as_many_weights_as_its_authors_say(step: ModuleType) -> None:
    norms = (2 * step.LAYERS + 1) * step.HIDDEN
    assert step.LAYERS * step.LAYER_WEIGHTS + 2 * step.VOCAB * step.HIDDEN + norms == 8_030_261_248
    assert step.KV_BYTES == 128 * 1024


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_the_tree_is_the_best_that_a_fixed_one_could_be(step: ModuleType, batch: int) -> None:
    """The budget keeps a size that is within 1 % of the best."""
    for gpu in step.GPUS:
        found = step.predict(gpu, batch, 1024)
        fixed = [step.predict(gpu, batch, 1024, step.Assumed(fixed_nodes=n)).speedup for n in (1, *range(2, 129, 3))]
        assert found.speedup >= 0.99 * max(1.0, *fixed)


def test_heads_that_are_never_right_are_not_asked(step: ModuleType) -> None:
    found = step.predict(step.GPUS[0], 4, 1024, step.Assumed(skill=0.01))
    assert (found.nodes, found.accepted, found.speedup) == (0.0, 1.0, 1.0)
