"""Results as tables in the terminal and as the contract's JSON."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from vllm_medusa.bench.peers import BASELINE
from vllm_medusa.bench.results import Ratio, Results, Run
from vllm_medusa.bench.step_cost import cost_json


def write_json(results: Results, path: Path) -> None:
    """Write the contract's JSON, with `cost` where a method learnt step times; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = results.to_json() | ({"cost": cost_json(results)} if results.costs else {})
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(results: Results) -> Table:
    """One row per method, data set and batch size: medians over the rounds, the ratio with its least and greatest.

    "accepted" is the mean accepted length, "same" the share of plain vLLM's tokens before the first difference.
    """
    ratios = {(ratio.method, ratio.dataset, ratio.batch_size): ratio for ratio in results.ratios()}
    shown = _table("tokens/s", "ratio", "min-max", "accepted", "same")
    for place, (dataset, batch_size, method), runs in _rows(shown, results):
        shown.add_row(
            *place,
            f"{statistics.median(run.tokens_per_second for run in runs):.1f}",
            *_ratio_cells(ratios.get((method, dataset, batch_size))),
            f"{statistics.median(run.mean_accepted_length for run in runs):.2f}",
            "" if method == BASELINE else f"{statistics.fmean(run.identical_tokens for run in runs):.1%}",
            style=_style(method),
        )
    return shown


def latency_table(results: Results) -> Table | None:
    """Milliseconds to the first token and from token to token, medians over the rounds; None for an offline bench.

    Tokens that come in one chunk share the time since the chunk before.
    """
    if all(run.ttft_p50 is None for run in results.runs):
        return None
    shown = _table("ttft p50", "ttft p99", "itl p50", "itl p99")
    shown.title = "Milliseconds to first token (ttft), between tokens (itl)"
    shown.title_justify = "left"
    shown.title_style = "dim"
    for place, (_, _, method), runs in _rows(shown, results):
        cells = [
            _milliseconds([run.ttft_p50 for run in runs]),
            _milliseconds([run.ttft_p99 for run in runs]),
            _milliseconds([run.itl_p50 for run in runs]),
            _milliseconds([run.itl_p99 for run in runs]),
        ]
        shown.add_row(*place, *cells, style=_style(method))
    return shown


def left_out_line(results: Results) -> Text | None:
    """How many prompts were too long to be asked; None if all were."""
    if not results.left_out:
        return None
    counts = ", ".join(f"{count} of {name}" for name, count in results.left_out.items())
    most = results.provenance.get("longest_prompt")
    return Text(
        f"Left out, too long with their answers (prompts of at most {most} tokens fit): {counts}", style="yellow"
    )


def memory_line(results: Results) -> Text | None:
    """Each engine's peak resident size, all of its processes added up, and how much it is over plain vLLM's."""
    engines = results.provenance.get("engine", {})
    peaks = {name: sum(facts.get("peak_resident_mib", {}).values()) for name, facts in engines.items()}
    plain = peaks.get(BASELINE)
    if not plain:
        return None
    told = [f"{name} {peak:.0f} ({peak / plain - 1:+.1%})" for name, peak in peaks.items() if name != BASELINE]
    return Text(f"Peak resident MiB: {', '.join([f'{BASELINE} {plain:.0f}', *told])}", style="dim")


def grouped(results: Results) -> dict[tuple[str, int, str], list[Run]]:
    """The runs by data set, batch size and method, in the order in which they were measured."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in results.runs:
        groups.setdefault((run.dataset, run.batch_size, run.method), []).append(run)
    return groups


def _table(*columns: str) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("prompts", no_wrap=True)
    shown.add_column("batch", justify="right")
    shown.add_column("method", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    return shown


def _rows(shown: Table, results: Results) -> Iterator[tuple[tuple[str, str, str], tuple[str, int, str], list[Run]]]:
    """(first cells, key, runs) of each row; data set and batch size are named once, a gap before the next."""
    before: tuple[str, int] | None = None
    for (dataset, batch_size, method), runs in grouped(results).items():
        if before is not None and before != (dataset, batch_size):
            shown.add_section()
        first = before != (dataset, batch_size)
        before = (dataset, batch_size)
        place = (dataset if first else "", str(batch_size) if first else "", method)
        yield place, (dataset, batch_size, method), runs


def _style(method: str) -> str:
    return "bold" if method == "medusa" else ""


def _milliseconds(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{1e3 * statistics.median(known):.1f}" if known else ""


def _ratio_cells(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    return f"{ratio.median:.2f}×", f"{ratio.min:.2f}-{ratio.max:.2f}"
