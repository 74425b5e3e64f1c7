"""The fuzzer's worlds: for each tiny model an engine of plain vLLM and one with trees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))  # engines.py


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory):
    """By the name of the model."""
    from hostile import start_worlds

    return start_worlds(tmp_path_factory.mktemp("fuzz"))
