"""One picture of a calibration: how right, how honest, how long, at what cost. Readable without colour."""

from pathlib import Path
from typing import Any

from vllm_medusa.training.calibration_report import CalibrationReport
from vllm_medusa.tree.drawing import new_figure

PERCENT = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MARKERS, STYLES = "osD^vPX*", ("-", "--", "-.", ":")


def draw_calibration(report: CalibrationReport, path: Path) -> None:
    """Write the picture; the ending of `path` says in which format (see tree.drawing.new_figure).

    Raises:
        MedusaError: matplotlib is missing, or the format is none of those.
    """
    figure = new_figure(path, "out", 10.5, 7.5)
    (accuracy, reliability), (length, cost) = figure.subplots(2, 2)
    _draw_accuracy(accuracy, report)
    _draw_reliability(reliability, report)
    _draw_length(length, report)
    _draw_cost(cost, report)
    for axis in (accuracy, reliability, length, cost):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    rows = report.calibration.rows
    figure.suptitle(f"{report.heads.name} on {Path(report.model).name}: {rows} rows of held-out answers")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_accuracy(axis: Any, report: CalibrationReport) -> None:
    for head, accuracy in enumerate(report.calibration.rank_accuracy):
        style = {"marker": MARKERS[head % len(MARKERS)], "linestyle": STYLES[head % len(STYLES)], "color": _grey(head)}
        ranks = [rank + 1 for rank, share in enumerate(accuracy) if share > 0]
        axis.plot(ranks, [accuracy[rank - 1] for rank in ranks], label=f"head {head + 1}", markersize=4, **style)
    axis.set_yscale("log")
    lowest = min((share for head in report.calibration.rank_accuracy for share in head if share > 0), default=0.01)
    shown = [share for share in PERCENT if share >= lowest / 2]
    axis.set_yticks(shown, [f"{share:g} %" for share in (100 * share for share in shown)])
    axis.minorticks_off()
    axis.set(title="How often a candidate is right", xlabel="rank of the candidate", ylabel="share of rows")
    axis.legend(frameon=False)


def _draw_reliability(axis: Any, report: CalibrationReport) -> None:
    axis.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    both = (("before", report.before, "--", "white"), ("after", report.after, "-", "black"))
    for name, curve, line, fill in both:
        seen = curve.count > 0
        label = f"{name}, error {curve.error:.3f}"
        axis.plot(curve.said[seen], curve.right[seen], line, color="black", linewidth=1, label=label)
        # Areas say how much of all probability a bin holds: that is where trees spend their nodes.
        mass = curve.said * curve.count
        areas = 12 + 240 * mass[seen] / max(float(mass.sum()), 1e-9)
        axis.scatter(curve.said[seen], curve.right[seen], s=areas, facecolor=fill, edgecolor="black", zorder=3)
    axis.set(title="Whether probabilities mean what they say", xlabel="probability said", ylabel="share that was right")
    axis.legend(frameon=False)


def _draw_length(axis: Any, report: CalibrationReport) -> None:
    axis.plot(list(report.expected), list(report.expected.values()), ":", color="black", label="static, promised")
    for kind, line, fill in (("static", "--", "white"), ("dynamic", "-", "black")):
        sizes = report.sizes(kind)
        style = {"color": "black", "marker": "o", "markersize": 5, "markerfacecolor": fill}
        axis.plot(list(sizes), list(sizes.values()), line, label=f"{kind}, replayed", **style)
    heads = len(report.calibration.temperatures)
    axis.plot([heads], [report.accepted["chain"]], "k+", markersize=10, label="chain, replayed")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(report.sizes("static")), [str(nodes) for nodes in report.sizes("static")])
    axis.set(title="What trees bring", xlabel="nodes", ylabel="tokens per step, bonus token counted")
    axis.legend(frameon=False)


def _draw_cost(axis: Any, report: CalibrationReport) -> None:
    axis.set(title="What a step costs on this machine", xlabel="tokens in the step", ylabel="milliseconds")
    if not report.step_cost:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
        return
    tokens, seconds = list(report.step_cost), [1e3 * value for value in report.step_cost.values()]
    axis.plot(tokens, seconds, "-o", color="black", markersize=4)
    axis.set_xscale("log", base=2)
    shown = [size for size in tokens if size & (size - 1) == 0]
    axis.set_xticks(shown, [str(size) for size in shown])
    axis.set_ylim(bottom=0)


def _grey(number: int) -> str:
    return str((0.0, 0.35, 0.55, 0.2)[number % 4])
