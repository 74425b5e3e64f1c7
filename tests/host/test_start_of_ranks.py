"""Two ranks that time their steps at start-up run the same steps, whatever their clocks and files say."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_medusa.host.startup import STEP_SIZES

RANK = Path(__file__).with_name("start_of_two_ranks.py")


@pytest.mark.slow
def test_ranks_run_the_same_steps(tmp_path: Path) -> None:
    """They meet in every step: did one run another, or one more, both would wait for ever.

    One clock is too quick, or only one rank kept times of an earlier start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(RANK)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        first, second = [json.loads(rank.communicate(timeout=180)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert first == second and len(first) == 4
    for found in first.values():
        assert {size for size, _ in found} <= set(STEP_SIZES) and len(found) >= 3
