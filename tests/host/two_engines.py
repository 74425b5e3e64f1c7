"""Inside the workers of two engines that step together, on a CPU: what vLLM 0.32 lacks there, and what a test asks.

Plain vLLM has no exchange of unequal parts on a CPU (`all_gatherv`, `reduce_scatterv`: NotImplementedError in the first
step). Both engines of the comparison get it here.
"""

from __future__ import annotations

from typing import Any

import torch
from on_each_rank import OnEachRank
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def all_gatherv(self: Any, given: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Every rank's rows, one rank after the other; `sizes` are their numbers."""
    if isinstance(given, list):
        return [all_gatherv(self, one, dim, sizes) for one in given]
    sizes = sizes or [len(given)] * self.world_size
    longest = torch.zeros(max(sizes), *given.shape[1:], dtype=given.dtype)
    longest[: len(given)] = given
    parts = [torch.empty_like(longest) for _ in sizes]
    torch.distributed.all_gather(parts, longest, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, given: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows of the sum."""
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group].clone()


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


class TwoEngines(OnEachRank):
    """Methods of a worker."""

    def count_dry_steps(self) -> None:
        """From now on, count the steps that the host runs here only because the other engine has something to do."""
        self.dry_steps, run = 0, self.execute_dummy_batch

        def execute_dummy_batch() -> None:
            self.dry_steps += 1
            run()

        self.execute_dummy_batch = execute_dummy_batch

    def dry_steps_so_far(self) -> int:
        """How many."""
        return self.dry_steps
