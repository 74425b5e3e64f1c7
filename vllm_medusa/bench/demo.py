"""The demo: the same prompts through plain vLLM and through Medusa trees, a table, one tree drawn, one line."""

import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vllm_medusa.bench.peers import BASELINE, choose_peers
from vllm_medusa.bench.process import EngineProcess
from vllm_medusa.bench.progress import BenchProgress
from vllm_medusa.bench.prompts import Dataset
from vllm_medusa.bench.report import table
from vllm_medusa.bench.results import Results, mean
from vllm_medusa.bench.run import Settings, run_bench
from vllm_medusa.bench.verdict import verdict
from vllm_medusa.json_lines import read_json_lines
from vllm_medusa.tree.drawing import QUOTED, draw
from vllm_medusa.tree.topology import Tree

LABEL = 24  # columns that a token and its probability take in a drawn tree, or less


def demo_datasets() -> list[Dataset]:
    """The chat, code and math prompts that ship with the package, one data set a kind."""
    file = Path(str(resources.files("vllm_medusa.bench") / "demo_prompts.jsonl"))
    rows = [row for _, row in read_json_lines(file, "data")]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [Dataset(kind, tuple(row["prompt"] for row in rows if row["kind"] == kind)) for kind in kinds]


def run_demo(settings: Settings, console: Console, *, verbose: bool = False) -> Results:
    """Measure, print the table, one step's tree and the summary; returns the results for the JSON."""
    drawings: list[Any] = []

    def draw_last(engines: dict[str, EngineProcess], results: Results) -> None:
        example = best_example(results.examples, console.width)
        if example is not None:
            quoted = f" {QUOTED}: only the text before expected it." if quoted_rows(example) else ""
            told = "One step of the last answer: every branch was checked in the same forward pass."
            drawings.append(Group(told + quoted, draw_step(example, engines["medusa"])))

    with BenchProgress(console) as progress:
        results = run_bench(
            choose_peers(["medusa"]), demo_datasets(), settings, progress, verbose=verbose, then=draw_last
        )
    console.print(table(results))
    for drawing in drawings:
        console.print()
        console.print(drawing)
    console.print()
    if any(run.identical_tokens < 1.0 for run in results.runs):
        console.print(difference_note(str(results.provenance["engine"][BASELINE]["dtype"])))
    told = verdict(results)
    if told is not None:
        console.print(told, soft_wrap=not console.is_terminal)
    console.print(summary(results), soft_wrap=not console.is_terminal)  # one line for what reads it from a pipe
    return results


def best_example(examples: Sequence[dict[str, Any]], width: int) -> dict[str, Any] | None:
    """The step worth showing: with branches and within `width` columns, if any is; of these one that accepted most,
    the latest of equals; None if none has drafts."""
    drafted = [example for example in examples if example["tokens"]]

    def worth(example: dict[str, Any]) -> tuple[bool, bool, int]:
        has_branches = len(set(example["parents"])) < len(example["parents"])
        columns = 4 * Tree(tuple(example["parents"]), tuple(example["ranks"])).max_depth + LABEL
        return has_branches, columns <= width, len(example["accepted_rows"])

    return max(reversed(drafted), key=worth, default=None)


def draw_step(example: dict[str, Any], engine: EngineProcess) -> Any:
    """One recorded step as a rich tree with the accepted path marked."""
    tree = Tree(tuple(example["parents"]), tuple(example["ranks"]))
    root = example.get("root")
    labels = [*(["root"] if root is None else engine.decode([root])), *engine.decode(example["tokens"])]
    accepted = [row for row in example["accepted_rows"] if row > 0]
    return draw(tree, labels, accepted=accepted, reach=example["reach"], quoted=quoted_rows(example))


def quoted_rows(example: dict[str, Any]) -> list[int]:
    """Rows of tokens that no head had among its candidates: the request's own text expected them."""
    return [row for row, rank in enumerate(example["ranks"], start=1) if rank >= example["candidates"]]


def summary(results: Results) -> Text:
    """The last line: median ratio, mean accepted length, share of identical tokens."""
    ratio = statistics.median(ratio.median for ratio in results.ratios())
    runs = results.select("medusa")
    accepted = sum(run.output_tokens - run.prompts for run in runs) / max(1.0, sum(run.request_steps for run in runs))
    return Text.assemble(
        ("Medusa trees: ", "bold"),
        (f"{ratio:.2f}× plain vLLM's tokens per second", "bold green" if ratio >= 1.0 else "bold red"),
        f", {accepted:.2f} tokens a step, {mean(run.identical_tokens for run in runs):.1%} identical tokens.",
    )


def difference_note(dtype: str) -> str:
    """Why tokens may differ, in one line."""
    if dtype == "float32":
        return "The outputs differ although float32 should be token-identical: please report this."
    return (
        f"In {dtype} two tokens can score almost the same, and checking several rows at once rounds differently from "
        "one row; from such a tie on, the texts differ. With --dtype float32 they are identical."
    )
