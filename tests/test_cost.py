"""What a step costs, and how many nodes that makes worth drafting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.cost import GRID, NodeBudget, StepCost


def steps(times: dict[int, float]) -> StepCost:
    return StepCost.from_points(list(times.items()))


def test_times_between_sizes_are_interpolated_and_never_fall():
    cost = steps({1: 2.0, 8: 1.0, 16: 4.0})
    found = cost.seconds(np.arange(1, 40))
    assert (np.diff(found) >= 0).all()
    assert found[0] == found[7] == pytest.approx(1.5)  # 1 and 8 contradict each other: they share their mean
    assert found[11] == pytest.approx((1.5 + 4.0) / 2)
    assert found[-1] > found[15]


def test_a_stall_moves_little_and_a_lasting_change_wins():
    cost = steps({4: 0.010, 8: 0.012})
    for _ in range(50):
        cost.observe(4, 0.010)
    cost.observe(4, 3.0)
    assert float(cost.seconds(4)) < 0.0103
    for _ in range(200):
        cost.observe(4, 0.011)
    assert float(cost.seconds(4)) == pytest.approx(0.011, rel=0.02)


def test_everything_is_drafted_until_costs_are_known():
    sizes = np.array([3, 2])
    assert NodeBudget(StepCost()).share(np.full((2, 3), 0.1, np.float32), sizes).tolist() == [3, 2]


def test_free_nodes_are_all_taken_and_dear_ones_are_not():
    reach = np.array([[0.9, 0.5, 0.2, 0.01]], dtype=np.float32)
    size = np.array([4])
    assert NodeBudget(steps({1: 1.0, 5: 1.0001})).share(reach, size).tolist() == [4]
    assert NodeBudget(steps({1: 1.0, 2: 1.95})).share(reach, size).tolist() == [0]
    assert NodeBudget(steps({1: 1.0, 2: 1.2, 3: 1.4, 4: 1.7, 5: 2.0})).share(reach, size).tolist() == [2]


def test_sure_requests_get_the_nodes():
    reach = np.array([[0.1, 0.05], [0.95, 0.9], [0.4, 0.1]], dtype=np.float32)
    shared = NodeBudget(steps({3: 1.0, 5: 1.05, 6: 1.5, 9: 3.0})).share(reach, np.array([2, 2, 2]))
    assert shared.tolist() == [0, 2, 0]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_share_is_the_best_one(seed):
    """Against brute force over all numbers of nodes, taken in order of probability."""
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    reach = -np.sort(-rng.random((batch, width)).astype(np.float32), axis=1)
    sizes = rng.integers(0, width + 1, batch)
    times = np.cumsum(rng.random(6)) + 1
    cost = steps(dict(zip((1, 4, 8, 12, 20, 40), times.tolist(), strict=True)))
    shared = NodeBudget(cost, hysteresis=0.0).share(reach, sizes)
    assert ((shared >= 0) & (shared <= sizes)).all()

    def rate(gain: float, nodes: int) -> float:
        return (batch + gain) / float(cost.seconds(batch + nodes))

    offered = np.sort(np.concatenate([reach[b, : sizes[b]] for b in range(batch)]))[::-1]
    best = max(rate(float(offered[:n].sum()), n) for n in range(len(offered) + 1))
    got = rate(float(sum(reach[b, : shared[b]].sum() for b in range(batch))), int(shared.sum()))
    assert got == pytest.approx(best, rel=1e-5)


def test_it_does_not_flutter_and_recovers():
    cost = steps({1: 1.0, 9: 1.01, 17: 1.02})
    budget = NodeBudget(cost, explore_every=10**9)
    rng = np.random.default_rng(0)
    reach = np.linspace(0.6, 0.02, 16, dtype=np.float32)[None]
    seen = [int(budget.share(reach * rng.uniform(0.98, 1.02), np.array([16]))[0]) for _ in range(50)]
    assert len(set(seen)) == 1
    for size in (9, 17):  # load rises: the same tokens now cost nine times as much
        for _ in range(250):
            cost.observe(size, 9.0)
    assert int(budget.share(reach, np.array([16]))[0]) == 0
    for size in (9, 17):
        for _ in range(100):
            cost.observe(size, 1.01)
    assert int(budget.share(reach, np.array([16]))[0]) >= 8


def test_other_sizes_are_tried_now_and_then():
    budget = NodeBudget(steps({1: 1.0, 9: 1.01, 17: 1.02, 33: 9.0}), explore_every=8)
    reach = np.linspace(0.9, 0.3, 30, dtype=np.float32)[None]
    seen = {int(budget.share(reach, np.array([30]))[0]) for _ in range(40)}
    assert len(seen) >= 2
    assert sorted(GRID) == list(GRID)
