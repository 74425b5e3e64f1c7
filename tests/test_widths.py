"""Nodes by number of requests: the best of the grid at each, fewer under load, none where none pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.cost import StepCost
from vllm_medusa.widths import DOUBT, LEFT, MEMORY, MeasuredReach, best_widths, first_ranges, width_grid, width_rates


@given(st.integers(1, 128), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_no_other_width_is_better(nodes: int, most: int, seed: int) -> None:
    """Against the rate computed number by number."""
    rng = np.random.default_rng(seed)
    sizes = [1, 4, 16, 64, 256, 1024]
    cost = StepCost.from_points(list(zip(sizes, np.sort(rng.random(6)) + 0.01, strict=True)))
    heads = StepCost.from_points([(1, 0.01), (32, 0.05)])
    reach = (-np.sort(-rng.random(nodes))).tolist()
    grid = width_grid(nodes)
    widths = best_widths(width_rates(cost, heads, reach, grid, most), grid)
    assert len(widths) == most + 1
    for requests in (1, (most + 1) // 2, most):
        rates = {
            width: requests * (1 + sum(reach[:width]))
            / (float(cost.seconds(requests * (1 + width))) + (float(heads.seconds(requests)) if width else 0.0))
            for width in grid
        }  # fmt: skip
        assert rates[widths[requests]] == pytest.approx(max(rates.values()), rel=1e-6)


def test_load_takes_nodes_away() -> None:
    """A machine that is free up to 64 tokens a step and then slows down in proportion."""
    cost = StepCost.from_points([(1, 1.0), (64, 1.0), (128, 2.0), (256, 4.0)])
    heads = StepCost.from_points([(1, 0.05), (32, 0.05)])
    widths = best_widths(
        width_rates(cost, heads, [0.5**depth for depth in range(1, 9)], width_grid(8), 64), width_grid(8)
    )
    assert widths[1] == 8 and widths[64] == 0
    assert widths == sorted(widths, reverse=True)


def test_reach_is_what_serving_shows() -> None:
    """Places that no tree has shown stay as calibrated; what was seen long ago fades."""
    reach = MeasuredReach([0.5, 0.25, 0.125])
    assert reach.values().tolist() == [0.5, 0.25, 0.125]
    for _ in range(1000):
        reach.learn([9, 1, 0], [10, 10, 0])
    assert reach.values().tolist() == pytest.approx([0.9, 0.1, 0.125], abs=0.01)
    half = int(MEMORY / 2)
    reach.learn([0, half, 0], [half, half, 0])
    assert reach.values().tolist() == pytest.approx([0.6, 0.4, 0.125], abs=0.01)
    doubted = MeasuredReach([1.0])
    doubted.learn([0], [int(DOUBT)])
    assert doubted.values().tolist() == [0.5]


def test_long_texts_take_nodes_away() -> None:
    """Where each node has to read a long text, fewer pay; what roots read makes every step longer, so more do."""
    heads = StepCost.from_points([(1, 0.001), (32, 0.001)])

    def widest(keys: float, node_keys: float) -> int:
        cost = StepCost.from_points([(1, 0.020), (8, 0.022), (64, 0.030)])
        for _ in range(400):
            for nodes in (0, 4):
                seconds = float(np.interp(1 + nodes, (1, 8), (0.020, 0.022))) + 1e-6 * (keys + node_keys * nodes)
                cost.observe(1 + nodes, seconds, keys, keys * nodes)
        rates = width_rates(cost, heads, [0.8**depth for depth in range(1, 17)], width_grid(16), 1, keys)
        return best_widths(rates, width_grid(16))[1]

    assert widest(7000.0, 7000.0) < widest(7000.0, 0.0) == 16


def test_reach_fades_in_its_weight_not_in_its_value() -> None:
    reach = MeasuredReach([0.5, 0.25])
    reach.learn([0, 0], [4000, 4000], now=1.0)
    reach.learn([0, 0], [0, 0], now=100.0)
    assert reach.values().tolist() == pytest.approx([0.0, 0.0], abs=0.01)
    reach.learn([int(LEFT)] * 2, [int(LEFT)] * 2, now=100.1)
    assert reach.values().tolist() == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.parametrize("nodes", [1, 2, 3, 32, 63, 128])
def test_the_first_table_is_one_that_the_host_takes(nodes: int) -> None:
    """Every width of the grid is in it, so that the host captures steps of each."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    lookup = build_dynamic_sd_schedule_lookup(first_ranges(nodes), 256, nodes)
    assert sorted(set(lookup[1:])) == width_grid(nodes)
    assert lookup[1:] == sorted(lookup[1:], reverse=True)
