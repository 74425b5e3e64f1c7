"""Heads as people want to see them: shape, accuracy by rank, origin, and a tree that they would draft."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_medusa.config import MedusaConfig, resolve, typical_rank_accuracy
from vllm_medusa.defaults import bundled_heads
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import read_config
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.source import locate_heads
from vllm_medusa.tree.drawing import draw
from vllm_medusa.tree.topology import Tree

DEFAULT_NODES = 16  # for the drawing, where heads name no number
RANKS_SHOWN = 5


def show_heads(heads: str | None, tree: str, num_nodes: int | None, console: Console) -> None:
    """Print the heads' config, their accuracy and one tree.

    Raises:
        MedusaError: heads or a tree that serving would refuse too.
    """
    folder = str(locate_heads(heads or str(bundled_heads())))
    config = read_config(folder)
    chosen = chosen_tree(config, tree, num_nodes)
    console.print(_facts(folder, config))
    if config.calibration is not None:
        console.print()
        console.print(_accuracy(config.calibration.rank_accuracy))
    console.print()
    accuracy = rank_accuracy(config)
    measured = "measured" if config.calibration is not None else "typical (these heads are not calibrated)"
    console.print(f"Tree {tree!r}, {chosen.num_nodes} nodes; 2.1 is head 2's candidate 1, with {measured} accuracy:")
    console.print(draw(chosen, labels(chosen), reach=reach(chosen, accuracy)))


def chosen_tree(config: HeadsConfig, tree: str, num_nodes: int | None) -> Tree:
    """The fixed tree that these settings mean; Medusa choices may be given as JSON text."""
    if tree == "dynamic":
        raise MedusaError.of("tree", tree, "dynamic trees are grown anew at each step; draw 'static' to see their like")
    wanted: Any = json.loads(tree) if tree.lstrip().startswith("[") else tree
    settings = resolve(
        MedusaConfig(model="heads", tree=wanted, num_speculative_tokens=num_nodes),
        "heads",
        num_heads=config.num_heads,
        top_k=config.top_k,
        rank_accuracy=rank_accuracy(config),
        default_nodes=DEFAULT_NODES,
    )
    assert settings.fixed_tree is not None  # only "dynamic" has none
    return settings.fixed_tree


def rank_accuracy(config: HeadsConfig) -> list[list[float]]:
    """[K][R]: measured where the heads are calibrated, else typical."""
    if config.calibration is not None:
        return config.calibration.rank_accuracy
    return typical_rank_accuracy(config.num_heads, config.top_k)


def labels(tree: Tree) -> list[str]:
    """Each row as head.rank, both from 1; the root by name.

    >>> labels(Tree((0, 1, 0)))
    ['root', '1.1', '2.1', '1.2']
    """
    ranks = tree.ranks or ()
    return ["root", *(f"{tree.depths[row]}.{ranks[row - 1] + 1}" for row in range(1, tree.num_rows))]


def reach(tree: Tree, accuracy: list[list[float]]) -> list[float]:
    """How likely each node is to be accepted: the product of its path's accuracies.

    >>> reach(Tree((0, 1, 0)), [[0.5, 0.2], [0.4, 0.1]])
    [0.5, 0.2, 0.2]
    """
    ranks = tree.ranks or ()
    found = [1.0]
    for row in range(1, tree.num_rows):
        found.append(found[tree.parents[row - 1]] * accuracy[tree.depths[row] - 1][ranks[row - 1]])
    return found[1:]


def _facts(folder: str, config: HeadsConfig) -> Table:
    facts = Table(box=None, show_header=False, pad_edge=False)
    kind = "the hidden row and the root token" if config.root_conditioned else "the hidden row"
    rows = {
        "heads": folder,
        "for": config.base_model or "(not said)",
        "shape": f"{config.num_heads} heads × {config.num_layers} blocks, hidden {config.hidden_size}, reading {kind}",
        "unembedding": {"target": "the target's", "shared": "their own, shared", "per_head": "one each"}[
            config.unembedding
        ],
        "vocabulary": f"{config.num_outputs} of {config.vocab_size} tokens",
        "candidates": f"{config.top_k} per head",
    }
    for name, value in rows.items():
        facts.add_row(f"[bold]{name}[/]", value)
    for name, value in (config.training or {}).items():
        facts.add_row(f"[bold]{name}[/]", str(value))
    return facts


def _accuracy(accuracy: list[list[float]]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("right token is")
    for rank in range(min(RANKS_SHOWN, len(accuracy[0]))):
        shown.add_column(f"candidate {rank + 1}", justify="right")
    shown.add_column("any of them", justify="right")
    for head, row in enumerate(accuracy, 1):
        shown.add_row(f"head {head}", *(f"{value:.1%}" for value in row[:RANKS_SHOWN]), f"{sum(row):.1%}")
    return shown
