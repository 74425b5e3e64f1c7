"""NaNs among the logits from which a request's tokens were drawn (`VLLM_COMPUTE_NANS_IN_LOGITS`)."""

from __future__ import annotations

import torch
from torch import Tensor


def nans_of_paths(logits: Tensor, first: Tensor, paths: Tensor) -> Tensor:
    """Count them by request.

    Args:
        logits: [L, V], of all rows.
        first: int64 [R], each request's root among the rows.
        paths: int64 [R, D + 1], the rows of each walk within its request, padded with -1.

    Returns:
        int32 [R].

    >>> rows = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [torch.nan, torch.nan]])
    >>> nans_of_paths(rows, torch.tensor([0, 2]), torch.tensor([[0, -1], [0, -1]])).tolist()
    [0, 2]
    """
    counts = torch.zeros(len(paths), dtype=torch.int32, device=logits.device)
    first, paths = first.to(logits.device), paths.to(logits.device)
    for rows in paths.T:  # one depth of all requests at a time: no copy of all rows
        of_row = logits[first + rows.clamp(min=0)].isnan().sum(dim=1, dtype=torch.int32)
        counts += of_row.where(rows >= 0, 0)
    return counts
