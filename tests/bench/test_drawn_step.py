"""Which recorded step the demo draws."""

from __future__ import annotations

from typing import Any

from vllm_medusa.bench.demo import best_example


def step(parents: list[int], accepted: int) -> dict[str, Any]:
    ranks = [parents[:place].count(parent) for place, parent in enumerate(parents)]
    return {"tokens": parents, "parents": parents, "ranks": ranks, "accepted_rows": [0, *range(1, accepted + 1)]}


def test_a_tree_with_branches_is_drawn_rather_than_a_longer_chain() -> None:
    chain, tree, better, last = step([0, 1, 2, 3], 4), step([0, 0, 1], 1), step([0, 0, 1], 2), step([0, 0, 1], 2)
    assert best_example([step([], 0), chain], 80) is chain
    assert best_example([tree, chain], 80) is tree
    assert best_example([better, chain, last, tree], 80) is last
    assert best_example([step([], 0)], 80) is None


def test_a_tree_that_fits_is_drawn_rather_than_a_deeper_one() -> None:
    deep, flat = step([0, 0, *range(2, 22)], 9), step([0, 0, 1], 1)
    assert best_example([deep, flat], 80) is flat
    assert best_example([deep, flat], 140) is deep
    assert best_example([deep], 80) is deep
