"""A tree as people see it: in the terminal, what was drafted and which path the target agreed with; or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.tree
from rich.text import Text

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.topology import Tree

ACCEPTED = "✔"  # says without colour what bold green says with it
QUOTED = "❝"


def draw(
    tree: Tree,
    labels: Sequence[str],
    accepted: Sequence[int] = (),
    reach: Sequence[float] | None = None,
    quoted: Sequence[int] = (),
) -> rich.tree.Tree:
    """A drawing of one step for rich's `print`.

    Args:
        tree: what was drafted.
        labels: the text of each row, the root first.
        accepted: rows of the accepted path; the root may be left out.
        reach: for each node, how likely the walk was to get there, shown as a percentage.
        quoted: rows that only the request's own text expected.

    >>> rich.print(draw(Tree((0, 1, 0, 1)), ["the", " cat", " sat", " dog", " ran"], accepted=[1, 4]))
    'the'
    ├── ' cat' ✔
    │   ├── ' sat'
    │   └── ' ran' ✔
    └── ' dog'
    """
    if len(labels) != tree.num_rows:
        raise ValueError(f"{len(labels)} labels for {tree.num_rows} rows, the root included")
    on_path, from_text = set(accepted), set(quoted)
    picture = rich.tree.Tree(Text(repr(labels[0]), style="bold"), guide_style="dim")
    branches = [picture]
    for row, parent in enumerate(tree.parents, start=1):
        taken = row in on_path
        # repr: the space before a word is part of its token, and a line break must not break the drawing
        label = Text(repr(labels[row]), style="bold green" if taken else "")
        if reach is not None:
            label.append(f" {reach[row - 1]:.0%}", style="dim")
        if row in from_text:
            label.append(f" {QUOTED}", style="dim")
        if taken:
            label.append(f" {ACCEPTED}", style="bold green")
        branches.append(branches[parent].add(label, guide_style="green" if taken else "dim"))
    return picture


def plot(tree: Tree, labels: Sequence[str], reach: Sequence[float], path: Path, title: str = "") -> None:
    """A picture of a tree, depth from left to right: the darker and larger a node, the likelier it is accepted.

    Args:
        tree: what is drafted.
        labels: the text of each row, the root first.
        reach: for each node, how likely it is to be accepted, shown in percent.
        path: the file to write (see `new_figure`).
        title: stands above it.

    Raises:
        MedusaError: matplotlib is missing, or the format is none that it writes.
    """
    if len(labels) != tree.num_rows or len(reach) != tree.num_nodes:
        raise ValueError(f"{len(labels)} labels and {len(reach)} probabilities for {tree.num_rows} rows")
    heights = _heights(tree)
    figure = new_figure(path, "plot", 2.0 + 1.9 * (tree.max_depth + 1), 1.2 + 0.26 * (max(heights) + 1))
    axis = figure.subplots()
    for row in range(1, tree.num_rows):
        parent, likely = tree.parents[row - 1], reach[row - 1]
        ends = [tree.depths[parent], tree.depths[row]], [heights[parent], heights[row]]
        axis.plot(*ends, color="0.5", linewidth=0.5 + 4 * likely, zorder=1, solid_capstyle="round")
    for row, label in enumerate(labels):
        likely = 1.0 if row == 0 else reach[row - 1]
        told = label if row == 0 else f"{label}  {_percent(likely)}"
        # The square root tells small shares apart too.
        grey = str(0.9 * (1.0 - likely**0.5))
        axis.scatter(tree.depths[row], heights[row], s=20 + 160 * likely, color=grey, edgecolor="black", zorder=2)
        axis.annotate(told, (tree.depths[row], heights[row]), (9, 3), textcoords="offset points", fontsize=7)
    axis.set_xlim(-0.2, tree.max_depth + 0.8)
    axis.set_ylim(max(heights) + 0.8, -0.8)
    axis.set_xticks(range(tree.max_depth + 1), ["root", *(f"head {depth + 1}" for depth in range(tree.max_depth))])
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def new_figure(path: Path, key: str, width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches, that can be written to `path`: .svg, .png or .pdf.

    Raises:
        MedusaError: matplotlib is missing, or `path`, the user's value for `key`, ends in something else.
    """
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise MedusaError.of(key, str(path), "name a file that ends in .svg, .png or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MedusaError.of(key, str(path), "drawing needs matplotlib: pip install 'vllm-medusa[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _heights(tree: Tree) -> list[float]:
    """Where each row lies from top to bottom: leaves one below the other, parents level with their first child.

    >>> _heights(Tree((0, 1, 0, 1)))  # cat (sat, ran), dog
    [0.0, 0.0, 0.0, 2.0, 1.0]
    """
    children: list[list[int]] = [[] for _ in range(tree.num_rows)]
    for row, parent in enumerate(tree.parents, start=1):
        children[parent].append(row)
    heights = [0.0] * tree.num_rows
    free, waiting = 0, [0]
    while waiting:
        row = waiting.pop()
        heights[row] = float(free)
        if not children[row]:
            free += 1
        waiting.extend(reversed(children[row]))
    return heights


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
