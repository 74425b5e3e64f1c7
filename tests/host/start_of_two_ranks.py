"""One of two ranks that time their steps at start-up: `start_of_two_ranks.py RANK PORT FOLDER`.

Prints one line of JSON: by what was awry, what `time_steps` yielded, [[tokens, seconds]].
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel

from vllm_medusa.host import startup
from vllm_medusa.kept import Kept

MOST = 32  # tokens
AWRY = ("nothing", "clock", "kept by rank 0", "kept by rank 1")


class Steps:
    """The part of a runner that is timed; ranks of a real one meet in each forward pass, and so do these."""

    device = torch.device("cpu")
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)

    def _dummy_run(self, tokens: int, randomize_inputs: bool) -> tuple[torch.Tensor, None]:
        met = torch.tensor([tokens])
        torch.distributed.all_reduce(met, group=get_tp_group().cpu_group)
        assert int(met) == 2 * tokens, f"this rank runs a step of {tokens} tokens, the other one of {int(met) - tokens}"
        return torch.zeros(tokens, 1), None


def times(rank: int, folder: Path, awry: str) -> list[Any]:
    """What `time_steps` yields on this rank."""
    quick = SimpleNamespace(perf_counter=lambda: time.perf_counter() * 1e4)  # ten thousand times too quick
    startup.time = quick if awry == "clock" and rank == 1 else time
    subject = {"rank of a test": rank}
    if awry.startswith("kept by") and rank == int(awry[-1]):
        kept = Kept(folder, subject)
        kept.put("steps", [[size, 1e-4 * size] for size in startup.STEP_SIZES])
        kept.save()
    return [[size, seconds] for size, seconds in startup.time_steps(Steps(), MOST, Kept(folder, subject))]


def main() -> None:
    """Join the other rank, time steps, say what was found."""
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            2, rank, f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo", timeout=timedelta(seconds=20)
        )
        initialize_model_parallel(2, backend="gloo")
        print(json.dumps({awry: times(rank, folder / awry, awry) for awry in AWRY}), flush=True)


if __name__ == "__main__":
    main()
