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


def test_a_stall_says_nothing_of_its_size_and_a_lasting_change_wins():
    cost = steps({4: 0.010, 8: 0.012})
    for _ in range(50):
        cost.observe(4, 0.010)
        cost.observe(8, 0.012)
    cost.observe(4, 3.0)
    assert float(cost.seconds(8) / cost.seconds(4)) == pytest.approx(1.2, rel=0.02)
    for _ in range(200):
        cost.observe(4, 0.011)
        cost.observe(8, 0.012)
    assert float(cost.seconds(4)) == pytest.approx(0.011, rel=0.02)
    assert float(cost.seconds(8)) == pytest.approx(0.012, rel=0.02)


def test_a_slow_minute_slows_every_size():
    cost = steps({4: 0.010, 8: 0.012, 16: 0.020})
    for _ in range(200):
        cost.observe(4, 0.020)
    assert float(cost.seconds(4)) == pytest.approx(0.020, rel=0.02)
    assert float(cost.seconds(16)) > 0.033  # not seen since, and thought slow all the same


def test_the_first_step_of_a_size_does_not_count_what_was_built_for_it():
    cost = steps({32: 0.040, 128: 0.100})
    cost.observe(80, 0.320)  # 0.070 by what is known
    assert float(cost.seconds(80)) < 1.3 * 0.070
    assert float(cost.seconds(32)) < 1.1 * 0.040
