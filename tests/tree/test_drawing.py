"""The drawing of one step, as a terminal without colour shows it."""

import io

import pytest
from rich.console import Console

from vllm_medusa.tree.drawing import ACCEPTED, QUOTED, draw
from vllm_medusa.tree.topology import Tree

TREE, LABELS = Tree((0, 1, 0, 1)), ["the", " cat", " sat", " dog", " ran\n"]


def shown(drawing: object) -> list[str]:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(drawing)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_accepted_path_is_marked_without_colour() -> None:
    lines = shown(draw(TREE, LABELS, accepted=[0, 1, 4]))
    assert len(lines) == 5  # a line break in a token stays escaped
    assert [ACCEPTED in line for line in lines] == [False, True, False, True, False]
    assert "' ran\\n'" in lines[3] and lines[1].index("'") < lines[2].index("'")


def test_reach_is_shown() -> None:
    assert "60%" in shown(draw(TREE, LABELS, reach=[0.6, 0.3, 0.2, 0.06]))[1]


def test_nodes_from_the_text_are_marked() -> None:
    lines = shown(draw(TREE, LABELS, accepted=[1], quoted=[1, 4]))
    assert [QUOTED in line for line in lines] == [False, True, False, True, False]
    assert lines[1].index(QUOTED) < lines[1].index(ACCEPTED)


def test_labels_must_fit() -> None:
    with pytest.raises(ValueError, match="2 labels for 5 rows"):
        draw(TREE, LABELS[:2])
