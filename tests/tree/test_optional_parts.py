"""What trees can do without: a compiler, and matplotlib."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_medusa.errors import MedusaError
from vllm_medusa.tree import native
from vllm_medusa.tree.drawing import plot
from vllm_medusa.tree.lookup import Lookups
from vllm_medusa.tree.topology import Tree


def test_without_a_compiler_python_does_it(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=native.logger.name):
        for _ in range(2):
            found = Lookups().follow([("a", np.array([5, 6, 7, 8, 5, 6], dtype=np.int32), 6)], 3)
    assert found.tokens.tolist() == [[7, 8, 5]]
    assert ["no C++ compiler" in record.message for record in caplog.records] == [True], "said, and said once"


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MedusaError, match=r"pip install 'vllm-medusa\[plot\]'"):
        plot(Tree((0,)), ["root", "1.1"], [0.5], tmp_path / "tree.svg")
    assert not (tmp_path / "tree.svg").exists()
