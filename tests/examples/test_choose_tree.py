"""examples/choose_tree.py in small: one prompt, engines in one process; MEDUSA_LONG=1 adds a second tree."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_medusa.config import MedusaConfig

CHOICES = "[[0], [1], [0, 0]]"
MOST = {CHOICES: 3.0} | ({"dynamic-8": 8.0} if os.environ.get("MEDUSA_LONG") else {})  # nodes by tree


def choose(repository: Path, *arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "examples/choose_tree.py", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]


@pytest.mark.slow
def test_trees_are_compared(repository: Path, environment: dict[str, str]) -> None:
    result = choose(
        repository, *MOST, "--prompts", "1", "--max-tokens", "24", "--enforce-eager",
        env={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "COLUMNS": "100"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    rows = dict(re.findall(r"^(\[\[0\].*\]\]|dynamic-8) +([\d. ]+)$", result.stdout, re.MULTILINE))
    assert set(rows) == set(MOST), result.stdout
    for tree, most in MOST.items():
        nodes, accepted, speed = (float(cell) for cell in rows[tree].split())
        assert 0.7 * most <= nodes <= most, "but for an answer's last step each tree is drafted whole"
        assert 1.0 < accepted <= 9.0 and speed > 0.0
    assert all(f"'{label}'" in result.stdout for label in ("root", "1.1", "1.2", "2.1"))
    assert "'1.3'" not in result.stdout, "the dynamic tree has no shape to draw"
    served = json.loads(result.stdout[result.stdout.rindex("speculative-config: ") + 20 :])
    assert MedusaConfig.parse(served)[0].adaptive is False


@pytest.mark.slow  # imports vLLM
def test_what_is_no_tree_is_named(repository: Path, environment: dict[str, str]) -> None:
    result = choose(repository, "oak", env=environment)
    assert result.returncode == 2
    assert "'oak': give Medusa choices" in result.stderr and "Traceback" not in result.stderr
