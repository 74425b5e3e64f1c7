"""Which recorded step the demo draws."""

from __future__ import annotations

from typing import Any

from vllm_medusa.bench.demo import best_example


def step(parents: list[int], accepted: int) -> dict[str, Any]:
    return {"tokens": parents, "parents": parents, "accepted_rows": [0, *range(1, accepted + 1)]}


def test_a_tree_with_branches_is_drawn_rather_than_a_longer_chain() -> None:
    chain, tree, better, last = step([0, 1, 2, 3], 4), step([0, 0, 1], 1), step([0, 0, 1], 2), step([0, 0, 1], 2)
    assert best_example([step([], 0), chain]) is chain
    assert best_example([tree, chain]) is tree
    assert best_example([better, chain, last, tree]) is last
    assert best_example([step([], 0)]) is None
