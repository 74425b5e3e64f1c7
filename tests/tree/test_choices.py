"""Medusa choices: what people may write, and what each mistake is answered with."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree.choices import PRESETS, load_choices, parse_choices, to_choices
from vllm_medusa.tree.topology import Tree


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_tree(name: str) -> None:
    choices = [list(path) for path in PRESETS[name]]
    tree = parse_choices(choices, num_heads=4, top_k=10)
    assert to_choices(tree) == choices  # parents come first already, so the order is kept
    assert 0 < tree.num_nodes <= 128


def test_the_public_tree_has_63_nodes() -> None:
    tree = parse_choices(PRESETS["mc_sim_7b_63"], num_heads=4, top_k=10)
    assert (tree.num_nodes, tree.max_depth) == (63, 4)
    assert [tree.depths.count(depth) for depth in range(1, 5)] == [10, 28, 23, 2]


@given(st.lists(st.integers(0, 40), max_size=40), st.randoms())
def test_any_order_gives_the_same_paths(parents: list[int], random: object) -> None:
    tree = Tree(tuple(parent % (node + 1) for node, parent in enumerate([0, *parents])))
    choices = to_choices(tree)
    heads, top_k = tree.max_depth, max(tree.ranks) + 1
    assert parse_choices(choices, heads, top_k) == tree
    shuffled = list(choices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = parse_choices(shuffled, heads, top_k)
    assert sorted(to_choices(again)) == sorted(choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "tree=.*empty"),
        ("mc", "tree='mc'.*list of paths"),
        ({"0": 1}, "list of paths"),
        (3, "tree=3.*list of paths"),
        ([0, 1], r"tree=0.*list of ranks"),
        ([[0], []], "at least one rank"),
        ([[0], [0, "1"]], r"\[0, '1'\].*whole numbers"),
        ([[0.0]], "whole numbers"),
        ([[True]], "whole numbers"),
        ([[-1]], r"tree=\[-1\].*whole numbers"),
        ([[0], [1, 0]], r"tree=\[1, 0\].*add the path it goes through, \[1\]"),
        ([[0], [0, 0], [0]], r"tree=\[0\].*listed twice"),
        ([[0], [0, 0], [0, 0, 0]], r"\[0, 0, 0\].*there are 2 heads"),
        ([[0], [3]], r"tree=\[3\].*offers 3 candidates"),
        ([[0]] * 129, "at most 128 nodes"),
    ],
)
def test_mistakes_are_named(choices: object, message: str) -> None:
    with pytest.raises(MedusaError, match=message):
        parse_choices(choices, num_heads=2, top_k=3)


def test_the_users_own_key_is_named() -> None:
    with pytest.raises(MedusaError, match=r"medusa: trees\[2\]=\[9\]"):
        parse_choices([[9]], num_heads=2, top_k=3, key="trees[2]")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps([[0], [0, 1]]))
    assert parse_choices(load_choices(path), 2, 2) == Tree((0, 1), (0, 1))
    path.write_text("[[0], ")
    with pytest.raises(MedusaError, match="not JSON"):
        load_choices(path)
    with pytest.raises(MedusaError, match="cannot be read"):
        load_choices(tmp_path / "missing.json")
