"""Which product is the quicker one, found out on real matrices."""

import time

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vllm_medusa.linear.measure import Comparison, compare
from vllm_medusa.linear.operator import ALWAYS, linear


def test_a_slower_product_is_never_chosen_and_a_quicker_one_always_is() -> None:
    if linear() is None:
        pytest.skip("there is no C++ compiler here")
    weight = torch.randn(2048, 2048)

    def slow(matrix: Tensor) -> object:
        def multiply(rows: Tensor) -> Tensor:
            time.sleep(0.03)
            return functional.linear(rows, matrix)

        return multiply

    found = compare(weight, slow)  # type: ignore[arg-type]
    assert found.mask == ALWAYS and found.never_slower and found.ratio(8) > 2
    found = compare(torch.randn(512, 512), lambda matrix: lambda rows: rows)
    assert found.mask == 0 and not found.never_slower


def test_what_was_found_survives_being_kept() -> None:
    found = Comparison(own={1: 1e-3, 8: 2e-3}, other={1: 2e-3, 8: 1e-3})
    assert Comparison.from_json(found.to_json()) == found
    for spoilt in (
        None,
        [],
        7,
        "x",
        {},
        [[1, 2]],
        [[1, None, 2]],
        [[3, 1.0, 1.0]],
        [[1, -1.0, 1.0]],
        [[1, float("nan"), 1.0]],
    ):
        assert Comparison.from_json(spoilt) is None
    assert found.mask & 1 and not found.never_slower
