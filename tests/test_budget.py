"""How many nodes are worth drafting, whether the heads are worth asking, and what promises are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.between import Between
from vllm_medusa.budget import NodeBudget
from vllm_medusa.cost import GRID, StepCost
from vllm_medusa.trust import LEAST_TRUST, Trust, Trusts


def steps(times: dict[int, float]) -> StepCost:
    return StepCost.from_points(list(times.items()))


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
    """Against brute force over the numbers of nodes that make a step of a size on the grid, in order of probability."""
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
    on_grid = [n for n in range(1, len(offered) + 1) if batch + n in GRID] or [len(offered)]
    best = max(rate(float(offered[:n].sum()), n) for n in (0, *on_grid))
    got = rate(float(sum(reach[b, : shared[b]].sum() for b in range(batch))), int(shared.sum()))
    assert got == pytest.approx(best, rel=1e-5)


def test_it_does_not_flutter_and_recovers():
    cost = steps({1: 1.0, 9: 1.01, 17: 1.02})
    budget = NodeBudget(cost, explore_every=10**9)
    rng = np.random.default_rng(0)
    reach = np.linspace(0.6, 0.02, 16, dtype=np.float32)[None]
    seen = [int(budget.share(reach * rng.uniform(0.98, 1.02), np.array([16]))[0]) for _ in range(50)]
    assert len(set(seen)) == 1
    for dear, result in ((9.0, 0), (1.02, 15)):  # load rises: the same tokens now cost nine times as much; and falls
        for _ in range(250):
            for size, seconds in ((1, 1.0), (9, dear), (17, dear)):
                cost.observe(size, seconds)
        assert int(budget.share(reach, np.array([16]))[0]) == result


def test_steps_have_sizes_of_the_grid():
    """The host builds and keeps something for every size of a step that it meets: speculation brings few."""
    rng = np.random.default_rng(5)
    cost = steps({tokens: 1.0 + 0.01 * tokens for tokens in GRID if tokens <= 128})
    for batch in (1, 7, 32):
        budget = NodeBudget(cost)
        for _ in range(200):
            reach = -np.sort(-(rng.random((batch, 12)).astype(np.float32) ** 3), axis=1)
            nodes = int(budget.share(reach, rng.integers(6, 13, batch)).sum())
            assert nodes == 0 or batch + nodes in GRID
    assert NodeBudget(cost).share(np.array([[0.9], [0.8]] + [[0.0]] * 30), np.array([1, 1] + [0] * 30)).sum() == 2


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_slow_minutes_do_not_make_the_sizes_served_in_them_look_dear(batch):
    """Against an oracle that knows the costs, on a machine of phases, stalls and sizes that are slow the first time."""

    def true(tokens):
        return 0.022 + 0.0013 * np.ceil(tokens / 2)

    shares = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cost = steps({size: 0.87 * float(true(size)) for size in (1, 2, 4, 8, 16, 32, 64, 128)})
        budget, met = NodeBudget(cost), set()
        tokens = seconds = most = least = 0.0
        for step in range(600):
            if step % 100 == 0:
                slow, certain = rng.choice([1.0, 1.0, 1.3, 1.8]), rng.uniform(0.6, 1.2)
            own = np.minimum(rng.beta(0.6, 1.4, (batch, 24)) * certain, 0.95) ** 0.25
            reach = np.cumprod(-np.sort(-own, axis=1), axis=1).astype(np.float32)
            size = batch + int(budget.share(reach, np.full(batch, 24)).sum())
            gained = batch + np.concatenate(([0.0], np.cumsum(np.sort(reach.ravel())[::-1])))
            best = int((gained / true(batch + np.arange(len(gained)))).argmax())
            tokens, seconds = tokens + gained[size - batch], seconds + slow * true(size)
            most, least = most + gained[best], least + slow * true(batch + best)
            stall = rng.uniform(1.5, 4.0) if rng.random() < 0.02 else 1.0
            cost.observe(size, slow * true(size) * stall * rng.lognormal(0.0, 0.06) + 0.05 * (size not in met))
            met.add(size)
        shares.append((tokens / seconds) / (most / least))
    assert np.mean(shares) > 0.97


def test_other_sizes_are_tried_now_and_then():
    budget = NodeBudget(steps({1: 1.0, 9: 1.01, 17: 1.02, 33: 9.0}), explore_every=8)
    reach = np.linspace(0.9, 0.3, 30, dtype=np.float32)[None]

    def drafted():
        budget.tries.earn(1.0)
        return int(budget.share(reach, np.array([30]))[0])

    assert len({drafted() for _ in range(200)}) >= 2
    assert sorted(GRID) == list(GRID)


def test_heads_that_cost_more_than_they_bring_are_asked_only_now_and_then():
    budget = NodeBudget(steps({1: 1.0, 64: 8.0}), retry_every=20)
    budget.heads_cost.observe(32, 0.5)
    reach, sizes = np.full((32, 4), 0.1, np.float32), np.full(32, 4)
    nothing = np.zeros((32, 0), np.float32)
    asked = 0
    for _ in range(200):
        budget.tries.earn(1000.0)
        if budget.asks_heads(32):
            asked += 1
            budget.share(reach, sizes, without_heads=nothing)
        else:
            budget.share(np.zeros((32, 0), np.float32), np.zeros(32, np.int64))
    assert 9 <= asked <= 8 + 200 // 20 + 1
    assert budget.asks_heads(1)  # another load: nothing is known, so they are


def test_heads_that_pay_again_are_asked_again():
    budget = NodeBudget(steps({1: 1.0, 64: 1.5}), retry_every=4)
    budget.heads_cost.observe(2, 0.2)
    nothing, sizes = np.zeros((2, 0), np.float32), np.full(2, 4)
    for reach, wanted in ((0.01, False), (0.9, True), (0.01, False)):
        for _ in range(200):
            budget.tries.earn(10.0)
            if budget.asks_heads(2):
                budget.share(np.full((2, 4), reach, np.float32), sizes, without_heads=nothing)
        assert budget._habits[2].asks is wanted


def test_what_a_lookup_promises_is_not_the_heads_merit():
    budget = NodeBudget(steps({1: 1.0, 64: 1.5}))
    budget.heads_cost.observe(1, 0.05)
    same = np.array([[0.9, 0.8]], np.float32)
    for _ in range(20):
        budget.share(same, np.array([2]), without_heads=same)
    assert not budget._habits[1].asks


def test_broken_promises_shrink_trees_to_nothing_and_kept_ones_bring_them_back():
    budget = NodeBudget(steps({1: 1.0, 9: 1.3}))
    trusts, reach, sizes = Trusts(), np.full((1, 8), 0.5, np.float32), np.array([8])
    trusts.add("a", 0.0)

    def drafted():
        return int(budget.share(reach, sizes, trust=trusts.shares(["a"], 0.0))[0])

    assert drafted() == 8
    for accepted, share, nodes in ((0.0, LEAST_TRUST, 0), (4.0, 1.0, 8)):
        for _ in range(400):
            trusts.learn(["a"], np.array([4.0]), np.array([accepted]), 0.0)
        assert trusts.shares(["a"], 0.0)[0] == pytest.approx(share, abs=0.06)
        assert drafted() == nodes


def test_trust_is_a_share_of_what_was_promised():
    rng = np.random.default_rng(0)
    trust = Trust()
    for _ in range(2000):
        trust.learn(3.0, float(rng.binomial(6, 0.3)))  # 1.8 of 3
    assert trust.share == pytest.approx(0.6, abs=0.06)


def test_what_passes_between_steps_is_spared_with_a_step() -> None:
    """Eight nodes make a step five times as long, but not a step with all that vLLM does before the next one."""
    cost = StepCost.from_points([(1, 0.010), (2, 0.011), (9, 0.050)])
    reach = np.full((1, 8), 0.35, dtype=np.float32)

    def nodes(waited: float) -> int:
        budget = NodeBudget(cost, explore_every=10**9)
        for _ in range(20):
            budget.between.observe(waited)
        return int(budget.share(reach, np.array([8]))[0])

    assert nodes(0.0) < nodes(0.030) == 8


def test_the_mean_between_steps_is_not_moved_by_one_long_wait() -> None:
    between = Between()
    for _ in range(50):
        between.observe(0.01)
    between.observe(60.0)
    assert between.seconds < 0.011
