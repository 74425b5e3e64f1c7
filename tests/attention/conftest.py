"""Fixtures of the attention tests."""

from __future__ import annotations

import pytest

from vllm_medusa.attention.cpu import Kernel, active_kernel


@pytest.fixture(params=["gather", "c++"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Both ways to compute; the compiled one only where it can be compiled."""
    if request.param == "c++" and active_kernel() != "c++":
        pytest.skip("no compiled kernel on this machine")
    chosen: Kernel = request.param
    return chosen
