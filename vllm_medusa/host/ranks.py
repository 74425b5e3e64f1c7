"""The ranks that serve one engine together, by tensor parallelism."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.distributed import get_tp_group


def is_first_rank() -> bool:
    """Whether this process is the one that reports."""
    return bool(get_tp_group().rank_in_group == 0)


def gather(values: Tensor) -> Tensor:
    """A tensor of one shape on all ranks to all of them: [ranks, ...], the same on every rank."""
    # In the CPU's shared memory, vLLM moves floats of four bytes and fewer only: the rest goes as pairs of these.
    on_the_way = values.view(torch.float32) if values.dtype.itemsize == 8 else values
    gathered: Tensor = get_tp_group().all_gather(on_the_way[None], dim=0)
    return gathered.view(values.dtype)


def agreed_seconds(seconds: float) -> float:
    """The first rank's clock, on every rank.

    What a rank has measured decides how much is drafted. Did each go by its own clock, they would draft different trees
    for one scheduler, and wait for each other for ever. Every rank has to ask at the same time.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return seconds
    told = torch.tensor([seconds], dtype=torch.float64)
    torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
    return float(told)
