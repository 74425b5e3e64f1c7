"""What a step costs."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_medusa.cost import StepCost


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
