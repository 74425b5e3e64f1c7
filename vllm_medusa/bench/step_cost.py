"""What the engine has learnt about the cost of a step, and how many nodes that leaves room for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_medusa.bench.results import Results, Run, mean
from vllm_medusa.cost import StepCost

FREE = 1.05
MOST_NODES = 128
MOST_WEIGHT = 20  # steps beyond these do not make a time more certain to the cost model


@dataclass(frozen=True)
class Allowance:
    """How many nodes per request pay at one batch size.

    Attributes:
        batch_size: requests in the step.
        accepted_length: tokens per step and request that the runs reached.
        drafted: nodes per request and step that they drafted.
        free: nodes per request that make a step at most 5 % longer.
        break_even: nodes per request at which the step has grown as much as `accepted_length`: more of them would lose
            against plain decoding unless more were accepted too.
    """

    batch_size: int
    accepted_length: float
    drafted: float
    free: int
    break_even: int


def read_cost(table: Sequence[dict[str, float]]) -> StepCost:
    """The cost model from its own table, each size weighted as in the engine."""
    return StepCost.from_points(
        [
            (int(row["tokens"]), row["milliseconds"] / 1e3)
            for row in table
            for _ in range(min(int(row["steps"]), MOST_WEIGHT))
        ]
    )


def nodes_within(cost: StepCost, batch_size: int, growth: float) -> int:
    """The most nodes per request whose step takes at most `growth` times one without nodes.

    >>> nodes_within(StepCost.from_points([(1, 0.010), (9, 0.018)]), 1, 1.4)
    4
    """
    plain = float(cost.seconds(batch_size))
    nodes = 0
    while nodes < MOST_NODES and float(cost.seconds(batch_size * (2 + nodes))) <= growth * plain * (1 + 1e-9):
        nodes += 1
    return nodes


def allowances(table: Sequence[dict[str, float]], runs: Sequence[Run]) -> list[Allowance]:
    """One per batch size of the runs, all of one method; none before the cost of two sizes is known."""
    cost = read_cost(table)
    if not cost.known:
        return []
    found = []
    for batch_size in sorted({run.batch_size for run in runs}):
        here = [run for run in runs if run.batch_size == batch_size]
        accepted = mean(run.mean_accepted_length for run in here)
        found.append(
            Allowance(
                batch_size,
                accepted_length=accepted,
                drafted=mean(run.drafted_nodes_per_request for run in here),
                free=nodes_within(cost, batch_size, FREE),
                break_even=nodes_within(cost, batch_size, accepted),
            )
        )
    return found


def cost_json(results: Results) -> dict[str, Any]:
    """For each method with a cost model: `steps` (tokens, milliseconds, steps seen) and `nodes` by batch size."""
    return {
        method: {"steps": table, "nodes": [asdict(row) for row in allowances(table, results.select(method))]}
        for method, table in results.costs.items()
    }


def cost_table(results: Results, method: str) -> Group:
    """Step times by tokens, beside the nodes that pay by batch size, for rich's `print`."""
    table = results.costs.get(method, [])
    if not table:
        return Group(Text(f"{method} has not learnt what a step costs: its trees were not sized by it."))
    both = Table.grid(padding=(0, 5))
    both.add_row(_times(table), _nodes(allowances(table, results.select(method))))
    title = Text(f"What a step costs, as {method} has learnt it, and the nodes per request that pay", style="bold")
    note = Text("free: at most 5 % slower; break-even: slower by as much as the accepted length", style="dim")
    return Group(title, both, note)


def _times(table: Sequence[dict[str, float]]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("tokens", "ms", "slower", "steps"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table:
        ratio = row["milliseconds"] / table[0]["milliseconds"]
        shown.add_row(str(int(row["tokens"])), f"{row['milliseconds']:.1f}", f"{ratio:.2f}×", str(int(row["steps"])))
    return shown


def _nodes(rows: Sequence[Allowance]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("batch", "drafted", "accepted", "free", "break-even"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        most = f"{row.break_even}+" if row.break_even == MOST_NODES else str(row.break_even)
        shown.add_row(str(row.batch_size), f"{row.drafted:.1f}", f"{row.accepted_length:.2f}", str(row.free), most)
    return shown
