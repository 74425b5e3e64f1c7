"""Fixtures of the attention tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_medusa.attention.cpu import Kernel, active_kernel


@pytest.fixture(autouse=True, scope="module")
def several_threads() -> Iterator[None]:
    """Kernels share their work among threads, even where the suite is run with one each."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["gather", "c++"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Both ways to compute; the compiled one only where it can be compiled."""
    if request.param == "c++" and active_kernel() != "c++":
        pytest.skip("no compiled kernel on this machine")
    chosen: Kernel = request.param
    return chosen
