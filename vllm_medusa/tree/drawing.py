"""One step as a picture in the terminal: what was drafted, and which path the target agreed with."""

from __future__ import annotations

from collections.abc import Sequence

import rich.tree
from rich.text import Text

from vllm_medusa.tree.topology import Tree

ACCEPTED = "✔"  # says without colour what bold green says with it


def draw(
    tree: Tree, labels: Sequence[str], accepted: Sequence[int] = (), reach: Sequence[float] | None = None
) -> rich.tree.Tree:
    """A drawing of one step for rich's `print`.

    Args:
        tree: what was drafted.
        labels: the text of each row, the root first.
        accepted: rows of the accepted path; the root may be left out.
        reach: for each node, how likely the walk was to get there, shown as a percentage.

    >>> rich.print(draw(Tree((0, 1, 0, 1)), ["the", " cat", " sat", " dog", " ran"], accepted=[1, 4]))
    'the'
    ├── ' cat' ✔
    │   ├── ' sat'
    │   └── ' ran' ✔
    └── ' dog'
    """
    if len(labels) != tree.num_rows:
        raise ValueError(f"{len(labels)} labels for {tree.num_rows} rows, the root included")
    on_path = set(accepted)
    picture = rich.tree.Tree(Text(repr(labels[0]), style="bold"), guide_style="dim")
    branches = [picture]
    for row, parent in enumerate(tree.parents, start=1):
        taken = row in on_path
        # repr: the space before a word is part of its token, and a line break must not break the drawing
        label = Text(repr(labels[row]), style="bold green" if taken else "")
        if reach is not None:
            label.append(f" {reach[row - 1]:.0%}", style="dim")
        if taken:
            label.append(f" {ACCEPTED}", style="bold green")
        branches.append(branches[parent].add(label, guide_style="green" if taken else "dim"))
    return picture
