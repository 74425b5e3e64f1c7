"""Fixtures of the tree tests; and Hypothesis without its deadline: machines that run tests are busy, and a slow example
is no fault of ours."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from vllm_medusa.tree import native

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(params=["compiled", "python"], scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to compute; the compiled one only where it can be compiled."""
    if request.param == "compiled" and native.load() is None:
        pytest.skip("no compiler on this machine")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "load", lambda: None)
        yield request.param
