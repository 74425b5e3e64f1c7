"""examples/offline_batch.py, as its reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_offline_batch(repository: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "examples/offline_batch.py"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("\n> ") == 4
    found = re.search(r"Mean accepted length: ([\d.]+)", result.stdout)
    assert found is not None
    assert float(found.group(1)) > 1.0, "the bundled heads guess nothing right"
