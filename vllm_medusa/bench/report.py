"""Results as a table in the terminal, as the contract's JSON and as one picture."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from vllm_medusa.bench.peers import BASELINE
from vllm_medusa.bench.results import Ratio, Results, Run
from vllm_medusa.errors import MedusaError

MARKERS = "osD^vPX*"


def write_json(results: Results, path: Path) -> None:
    """Write the contract's JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results.to_json(), indent=2) + "\n", encoding="utf-8")


def table(results: Results) -> Table:
    """One row per method, data set and batch size: medians over the rounds, the ratio with its least and greatest.

    "accepted" is the mean accepted length, "same" the share of plain vLLM's tokens before the first difference.
    """
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("prompts", no_wrap=True)
    shown.add_column("batch", justify="right")
    shown.add_column("method", no_wrap=True)
    for column in ("tokens/s", "ratio", "min-max", "accepted", "same"):
        shown.add_column(column, justify="right", no_wrap=True)
    ratios = {(ratio.method, ratio.dataset, ratio.batch_size): ratio for ratio in results.ratios()}
    before: tuple[str, int] | None = None
    for (dataset, batch_size, method), runs in grouped(results).items():
        if before is not None and before != (dataset, batch_size):
            shown.add_section()
        first = before != (dataset, batch_size)
        before = (dataset, batch_size)
        shown.add_row(
            dataset if first else "",
            str(batch_size) if first else "",
            method,
            f"{statistics.median(run.tokens_per_second for run in runs):.1f}",
            *_ratio_cells(ratios.get((method, dataset, batch_size))),
            f"{statistics.median(run.mean_accepted_length for run in runs):.2f}",
            "" if method == BASELINE else f"{statistics.fmean(run.identical_tokens for run in runs):.1%}",
            style="bold" if method == "medusa" else "",
        )
    return shown


def grouped(results: Results) -> dict[tuple[str, int, str], list[Run]]:
    """The runs by data set, batch size and method, in the order in which they were measured."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in results.runs:
        groups.setdefault((run.dataset, run.batch_size, run.method), []).append(run)
    return groups


def plot(results: Results, path: Path) -> None:
    """Draw speed-up against batch size, one panel per data set, one line per method, bars from least to greatest."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MedusaError.of("plot", str(path), "drawing needs matplotlib: pip install 'vllm-medusa[plot]'") from error

    ratios = results.ratios()
    datasets = list(dict.fromkeys(ratio.dataset for ratio in ratios))
    figure = Figure(figsize=(4.2 * max(1, len(datasets)), 3.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(datasets)), sharey=True, squeeze=False)[0]
    for axis, dataset in zip(axes, datasets, strict=False):
        axis.axhline(1.0, color="black", linewidth=0.8)
        for number, method in enumerate(dict.fromkeys(ratio.method for ratio in ratios)):
            line = [ratio for ratio in ratios if (ratio.method, ratio.dataset) == (method, dataset)]
            _draw_line(axis, line, method, number)
        axis.set_title(dataset)
        axis.set_xlabel("batch size")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s over plain vLLM")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_line(axis: object, line: Sequence[Ratio], method: str, number: int) -> None:
    """Markers and dashes differ as well as colours, so the picture can be read in grey."""
    sizes = [ratio.batch_size for ratio in line]
    medians = [ratio.median for ratio in line]
    spread = [[r.median - r.min for r in line], [r.max - r.median for r in line]]
    style = ("-", "--", ":", "-.")[number % 4]
    marker = MARKERS[number % len(MARKERS)]
    axis.errorbar(  # type: ignore[attr-defined]
        sizes, medians, yerr=spread, label=method, marker=marker, linestyle=style, color=f"C{number}", capsize=3
    )
    axis.set_xscale("log", base=2)  # type: ignore[attr-defined]
    axis.set_xticks(sizes, [str(size) for size in sizes])  # type: ignore[attr-defined]


def _ratio_cells(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    return f"{ratio.median:.2f}×", f"{ratio.min:.2f}-{ratio.max:.2f}"
