"""The processes that train together: started by torchrun, on one machine or several."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed

from vllm_medusa.quota import usable_cores

# The first process answers prompts for hours while the others wait for it.
_PATIENCE = datetime.timedelta(days=14)
# What torchrun tells its processes, and vLLM's own would take for theirs.
_TOLD = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    >>> Ranks(1, 2).share(np.arange(5)).tolist()
    [3, 4]
    """

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process answers, writes and talks."""
        return self.number == 0

    def share(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What this process has of a batch; its shares are as even as can be, and may be empty."""
        return np.array_split(rows, self.count)[self.number]

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values


def launched() -> Ranks:
    """Which of torchrun's processes this is; alone without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Ranks()
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """The processes know each other: by NCCL where each has a GPU, else by gloo. Waits for the last to come."""
    if ranks.count == 1:
        yield
        return
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpus else "gloo", timeout=_PATIENCE)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """The environment without what torchrun told this process, while it starts engines of its own."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    before = dict(os.environ)
    for name in before:
        if name in _TOLD or name.startswith("TORCHELASTIC_") or name.endswith("WORLD_SIZE"):
            del os.environ[name]
    if before.get("OMP_NUM_THREADS") == "1":  # torchrun's own default for many processes; the engine is one
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())
    try:
        yield
    finally:
        os.environ.update(before)
