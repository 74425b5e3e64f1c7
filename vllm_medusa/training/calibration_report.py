"""What a calibration found, as tables for people and as JSON."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_medusa.bench.provenance import collect
from vllm_medusa.cost import StepCost
from vllm_medusa.heads.config import Calibration
from vllm_medusa.training.reliability import Reliability
from vllm_medusa.tree.choices import to_choices
from vllm_medusa.tree.topology import Tree

RANKS = (1, 2, 3, 5, 10)
THREADS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


@dataclass(frozen=True)
class CalibrationReport:
    """A calibration and what was measured with it.

    Attributes:
        heads: folder of the heads.
        model: the target.
        calibration: what their config now says.
        before, after: reliability of all heads' candidates without and with the temperatures.
        tree: the static tree of the number of nodes that is drafted by default.
        expected: nodes -> tokens per step that the accuracies promise for a static tree of that size.
        accepted: kind of tree ("chain", "static-8", "dynamic-8", …) -> tokens per step over the replayed answers.
        step_cost: tokens in a step -> seconds, on this machine; empty where it was not measured.
    """

    heads: Path
    model: str
    calibration: Calibration
    before: Reliability
    after: Reliability
    tree: Tree
    expected: dict[int, float]
    accepted: dict[str, float]
    step_cost: dict[int, float]

    def sizes(self, kind: str) -> dict[int, float]:
        """Nodes -> accepted length of one kind of tree, "static" or "dynamic"."""
        names = [name for name in self.accepted if name.startswith(f"{kind}-")]
        return {int(name.split("-")[1]): self.accepted[name] for name in names}

    def rates(self) -> dict[int, float]:
        """Nodes -> tokens per second of one request alone with dynamic trees, by accepted length over step time.

        The heads' own time and attention over a long context are not in it. Empty without step times.
        """
        if len(self.step_cost) < 2:
            return {}
        cost = StepCost.from_points(list(self.step_cost.items()))
        lengths = {0: 1.0, **self.sizes("dynamic")}
        return {nodes: length / float(cost.seconds(1 + nodes)) for nodes, length in lengths.items()}

    def to_json(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {
            "heads": str(self.heads),
            "model": self.model,
            "calibration": self.calibration.model_dump(mode="json", exclude_none=True),
            "reliability": {"before": self.before.table(), "after": self.after.table()},
            "static_tree": {"nodes": self.tree.num_nodes, "choices": to_choices(self.tree)},
            "expected_accepted_length": {str(nodes): round(length, 4) for nodes, length in self.expected.items()},
            "accepted_length": self.accepted,
            "step_cost": [
                {"tokens": tokens, "milliseconds": round(1e3 * seconds, 3)}
                for tokens, seconds in self.step_cost.items()
            ],
            "tokens_per_second": {str(nodes): round(rate, 2) for nodes, rate in self.rates().items()},
        }

    def write_json(self, path: Path) -> None:
        """Write `to_json` beside where and on what it was measured; folders are made."""
        threads = {name: os.environ[name] for name in THREADS if name in os.environ}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"provenance": collect(threads), **self.to_json()}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def tables(self) -> Group:
        """For rich's `print`."""
        about = Text("temp., error: the fitted temperature, and the calibration error before it and after", style="dim")
        parts: list[Any] = [_accuracy(self.calibration), about, Text(), _lengths(self)]
        rates = self.rates()
        if rates:
            best = max(rates, key=lambda nodes: rates[nodes])
            told = f"One request alone is fastest here at about {best} nodes, the heads' own time left out."
            parts += [Text(), _cost(self.step_cost), Text(told)]
        choices = ", ".join(str(choice) for choice in to_choices(self.tree))
        return Group(*parts, Text(), Text(f"Static tree of {self.tree.num_nodes} nodes: [{choices}]"))


def _table(first: str, *columns: str) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column(first)
    for column in columns:
        shown.add_column(column, justify="right")
    return shown


def _accuracy(calibration: Calibration) -> Table:
    most = len(calibration.rank_accuracy[0])
    ranks = [rank for rank in RANKS if rank <= most]
    tops = [f"top {rank}" for rank in ranks]
    shown = _table("right token is", *tops, "temp.", "error", "after")
    for head, accuracy in enumerate(calibration.rank_accuracy):
        before, after = (calibration.ece_before or [])[head], (calibration.ece_after or [])[head]
        shares = [f"{sum(accuracy[:rank]):.1%}" for rank in ranks]
        shown.add_row(
            f"head {head + 1}", *shares, f"{calibration.temperatures[head]:.3f}", f"{before:.4f}", f"{after:.4f}"
        )
    return shown


def _lengths(report: CalibrationReport) -> Table:
    static, dynamic = report.sizes("static"), report.sizes("dynamic")
    shown = _table("tokens per step, by nodes", *(str(nodes) for nodes in static))
    most = max(report.expected)  # heads with few candidates fill no larger tree
    shown.add_row("static tree, promised", *(f"{report.expected[min(nodes, most)]:.2f}" for nodes in static))
    shown.add_row("static tree, replayed", *(f"{length:.2f}" for length in static.values()))
    shown.add_row("dynamic tree, replayed", *(f"{dynamic[nodes]:.2f}" for nodes in static))
    shown.add_row("chain of all heads", f"{report.accepted['chain']:.2f}")
    return shown


def _cost(step_cost: dict[int, float]) -> Table:
    few = [tokens for tokens in step_cost if tokens & (tokens - 1) == 0]
    shown = _table("step, by its tokens", *(str(tokens) for tokens in few))
    shown.add_row("milliseconds", *(f"{1e3 * step_cost[tokens]:.1f}" for tokens in few))
    return shown
