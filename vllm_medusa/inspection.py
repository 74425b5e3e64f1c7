"""Heads as people want to see them: shape, accuracy by rank, origin, and a tree that they would draft."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_medusa.config import MedusaConfig, rank_accuracy_of, resolve
from vllm_medusa.defaults import bundled_heads
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import Calibration, HeadsConfig
from vllm_medusa.heads.opening import OpenedHeads, open_folder
from vllm_medusa.heads.source import locate_heads
from vllm_medusa.json_file import NotJson, parse_json
from vllm_medusa.tree.drawing import draw, new_figure, plot
from vllm_medusa.tree.topology import Tree

DEFAULT_NODES = 16  # for the drawing, where heads name no number
RANKS_SHOWN = 5


def show_heads(
    heads: str | None, tree: str, num_nodes: int | None, console: Console, picture: Path | None = None
) -> None:
    """Print the heads' config, their accuracy and one tree; draw that into the file `picture`, if one is named.

    Raises:
        MedusaError: heads or a tree that serving would refuse too; a picture that cannot be drawn.
    """
    if picture is not None:
        new_figure(picture, "plot", 1.0, 1.0)  # before anything is printed
    folder = locate_heads(heads or str(bundled_heads()))
    opened = open_folder(folder)
    config, calibration = opened.config, opened.config.calibration
    chosen = chosen_tree(config, tree, num_nodes)
    console.print(_facts(folder, opened))
    console.print()
    if calibration is not None:
        console.print(_accuracy(calibration))
    else:
        console.print("How accurate they are is not known: these heads are not calibrated (vllm-medusa calibrate).")
    console.print()
    likely = chosen.reach(rank_accuracy_of(config))
    measured = "measured" if calibration is not None else "typical (these heads are not calibrated)"
    shown = escape(f"Tree {tree!r}, {chosen.num_nodes} nodes")
    console.print(f"{shown}; 2.1 is head 2's candidate 1, with {measured} accuracy:")
    console.print(draw(chosen, labels(chosen), reach=likely))
    console.print(f"It is expected to give {1.0 + sum(likely):.2f} tokens per step, the bonus token counted.")
    if picture is not None:
        title = f"{folder.name}: {1.0 + sum(likely):.2f} tokens per step by {measured} accuracy"
        plot(chosen, labels(chosen), likely, picture, title)
        console.print(f"Drawn in {picture}.")


def chosen_tree(config: HeadsConfig, tree: str, num_nodes: int | None) -> Tree:
    """The fixed tree that these settings mean; Medusa choices may be given as JSON text."""
    if tree == "dynamic":
        raise MedusaError.of("tree", tree, "dynamic trees are grown anew at each step; draw 'static' to see their like")
    wanted: Any = tree
    if tree.lstrip().startswith("["):
        try:
            wanted = parse_json(tree)
        except NotJson as error:
            raise MedusaError.of("tree", tree, f"{error}; give choices such as [[0], [0, 0], [1]]") from None
    settings = resolve(
        MedusaConfig.parse({"model": "heads", "tree": wanted, "num_speculative_tokens": num_nodes})[0],
        "heads",
        num_heads=config.num_heads,
        top_k=config.top_k,
        rank_accuracy=rank_accuracy_of(config),
        default_nodes=DEFAULT_NODES,
    )
    assert settings.fixed_tree is not None  # only "dynamic" has none
    return settings.fixed_tree


def labels(tree: Tree) -> list[str]:
    """Each row as head.rank, both from 1; the root by name.

    >>> labels(Tree((0, 1, 0)))
    ['root', '1.1', '2.1', '1.2']
    """
    ranks = tree.ranks or ()
    return ["root", *(f"{tree.depths[row]}.{ranks[row - 1] + 1}" for row in range(1, tree.num_rows))]


def _facts(folder: Path, opened: OpenedHeads) -> Table:
    config, weights = opened.config, opened.weights
    facts = Table(box=None, show_header=False, pad_edge=False)
    kind = "the hidden row and the root token" if config.root_conditioned else "the hidden row"
    trunk = "" if config.trunk_size is None else f" on a trunk of {config.trunk_size}"
    files = sorted(set(weights.files.values()))
    size = sum(file.stat().st_size for file in files) / 1e6
    first = next(iter(opened.plan.values()))[0]
    dtype = str(weights.dtype(first)).removeprefix("torch.")
    guessed = f"{config.num_outputs} of {config.vocab_size} tokens" if config.vocab_size else "the target's"
    rows = {
        "heads": str(folder),
        "format": f"{opened.origin}, {dtype}, {size:.1f} MB in {', '.join(file.name for file in files)}",
        "for": config.base_model or "(not said)",
        "shape": f"{config.num_heads} heads × {config.num_layers} blocks{trunk}, hidden {config.hidden_size}",
        "reading": kind,
        "unembedding": {"target": "the target's", "shared": "their own, shared", "per_head": "one each"}[
            config.unembedding
        ],
        "vocabulary": guessed,
        "candidates": f"{config.top_k} per head",
    }
    if config.calibration is not None and config.calibration.num_speculative_tokens:
        nodes = config.calibration.num_speculative_tokens
        rows["nodes"] = ", ".join(f"{number} ({platform})" for platform, number in nodes.items()) + " by default"
    for name, value in (rows | _flat(config.training or {})).items():
        facts.add_row(f"[bold]{escape(name.replace('_', ' '))}[/]", Text(value))
    return facts


def _flat(facts: dict[str, Any], above: str = "") -> dict[str, str]:
    """Nested facts as one line each.

    >>> _flat({"epochs": 2, "accepted_length": {"chat": {"chain": 1.6, "dynamic-8": 1.9}}})
    {'epochs': '2', 'accepted_length, chat': 'chain 1.6, dynamic-8 1.9'}
    """
    lines: dict[str, str] = {}
    for name, value in facts.items():
        key = f"{above}, {name}" if above else name
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            lines |= _flat(value, key)
        elif isinstance(value, dict):
            lines[key] = ", ".join(f"{inner} {number}" for inner, number in value.items())
        elif isinstance(value, list):
            lines[key] = ", ".join(map(str, value))
        else:
            lines[key] = str(value)
    return lines


def _accuracy(calibration: Calibration) -> Table:
    accuracy = calibration.rank_accuracy
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("right token is")
    for rank in range(min(RANKS_SHOWN, len(accuracy[0]))):
        shown.add_column(f"guess {rank + 1}", justify="right")
    for column in (f"any of {len(accuracy[0])}", "temp.", "error"):
        shown.add_column(column, justify="right")
    errors = calibration.ece_after
    for head, row in enumerate(accuracy):
        shown.add_row(
            f"head {head + 1}",
            *(f"{value:.1%}" for value in row[:RANKS_SHOWN]),
            f"{sum(row):.1%}",
            f"{calibration.temperatures[head]:.3f}",
            f"{errors[head]:.4f}" if errors else "",
        )
    if calibration.rows is not None:
        shown.caption = f"on {calibration.rows} rows of held-out answers; temp., error: of calibration"
        shown.caption_justify = "left"
    return shown
