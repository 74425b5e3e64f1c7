"""Bins and calibration error against a loop over candidates."""

import numpy as np
import pytest

from vllm_medusa.training.reliability import BINS, reliability_of


def naive_error(said: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for number in range(BINS):
        inside = [i for i, p in enumerate(said) if min(int(p * BINS), BINS - 1) == number]
        if inside:
            mean = sum(float(said[i]) for i in inside) / len(inside)
            share = sum(bool(right[i]) for i in inside) / len(inside)
            total += abs(mean - share) * sum(float(said[i]) for i in inside)
    return total / float(said.sum())


@pytest.mark.parametrize("seed", range(4))
def test_error_equals_a_loop_over_candidates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    said = rng.random(300).astype(np.float32)
    right = rng.random(300) < said**2
    curve = reliability_of(said, right)
    assert curve.error == pytest.approx(naive_error(said, right), rel=1e-5)
    assert int(curve.count.sum()) == 300 == sum(row["candidates"] for row in curve.table())


def test_honest_probabilities_have_next_to_no_error() -> None:
    rng = np.random.default_rng(0)
    said = rng.random(200_000).astype(np.float32)
    assert reliability_of(said, rng.random(200_000) < said).error < 0.005


def test_certainty_and_nothing_at_all_are_no_special_cases() -> None:
    assert reliability_of(np.ones(3, np.float32), np.ones(3, bool)).error == 0.0
    assert reliability_of(np.zeros(0, np.float32), np.zeros(0, bool)).error == 0.0
