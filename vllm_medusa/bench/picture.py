"""One picture of a bench: speed-up against batch size, and what the nodes bring. Readable without colour."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_medusa.bench.peers import BASELINE
from vllm_medusa.bench.results import Ratio, Results
from vllm_medusa.tree.drawing import new_figure

MARKERS, STYLES = "osD^vPX*", ("-", "--", ":", "-.")
PANEL = (4.4, 3.7)  # inches


def check_picture(path: Path) -> None:
    """Refuse a file that could not be drawn, before an hour of work.

    Raises:
        MedusaError: matplotlib is missing, or the ending is none of .svg, .png and .pdf.
    """
    new_figure(path, "plot", 1.0, 1.0)


def plot(results: Results, path: Path) -> None:
    """Write the picture: a panel of speed-ups for each data set, then one of accepted length against drafted nodes.

    Points are medians over the rounds, bars go from least to greatest. A method looks the same in every panel.
    """
    ratios = results.ratios()
    methods = [name for name in dict.fromkeys(run.method for run in results.runs) if name != BASELINE]
    datasets = list(dict.fromkeys(run.dataset for run in results.runs))
    panels = len(datasets) + 1
    columns = panels if panels <= 3 else math.ceil(panels / 2)
    rows = math.ceil(panels / columns)
    figure = new_figure(path, "plot", PANEL[0] * columns, PANEL[1] * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis, dataset in zip(axes, datasets, strict=False):
        here = [ratio for ratio in ratios if ratio.dataset == dataset]
        axis.sharey(axes[0])
        _draw_speed(axis, here, methods)
        axis.set_title(dataset)
    _draw_length(axes[len(datasets)], results, methods)
    if methods:
        axes[0].legend(frameon=False, fontsize="small")
    for axis in axes[:panels]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_speed(axis: Any, ratios: Sequence[Ratio], methods: Sequence[str]) -> None:
    axis.axhline(1.0, color="black", linewidth=0.8)
    for method in methods:
        line = sorted((ratio for ratio in ratios if ratio.method == method), key=lambda ratio: ratio.batch_size)
        medians = [ratio.median for ratio in line]
        spread = [[ratio.median - ratio.min for ratio in line], [ratio.max - ratio.median for ratio in line]]
        sizes = [ratio.batch_size for ratio in line]
        axis.errorbar(sizes, medians, yerr=spread, label=method, capsize=3, **_style(method, methods))
    sizes = sorted({ratio.batch_size for ratio in ratios})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set(xlabel="batch size", ylabel="tokens/s over plain vLLM")


def _draw_length(axis: Any, results: Results, methods: Sequence[str]) -> None:
    """One line per method and data set, its points the batch sizes; the first method's lines tell the data sets."""
    axis.axhline(1.0, color="black", linewidth=0.8)
    for method in methods:
        for dataset in dict.fromkeys(run.dataset for run in results.runs):
            points = sorted(_lengths(results, method, dataset))
            axis.plot(*zip(*points, strict=True), alpha=0.8, **_style(method, methods))
            if method == methods[0]:
                beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
                axis.annotate(dataset, points[-1], **beside)
    axis.set_xlim(0, 1.25 * max(1.0, axis.get_xlim()[1]))  # room for their names
    axis.set(title="What drafting brings", xlabel="nodes drafted per request and step", ylabel="mean accepted length")


def _lengths(results: Results, method: str, dataset: str) -> list[tuple[float, float]]:
    """(nodes drafted per request and step, mean accepted length), one for each batch size."""
    runs = results.select(method, dataset)
    points = []
    for batch_size in sorted({run.batch_size for run in runs}):
        here = [run for run in runs if run.batch_size == batch_size]
        nodes = statistics.median(run.drafted_nodes_per_request for run in here)
        points.append((nodes, statistics.median(run.mean_accepted_length for run in here)))
    return points


def _style(method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Markers and dashes differ as well as colours."""
    number = methods.index(method)
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": STYLES[number % len(STYLES)],
        "color": f"C{number}",
        "markersize": 5,
        "linewidth": 1.2,
    }
