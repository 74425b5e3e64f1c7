"""Two shortcuts of the heads' hot path on a CPU: products of few rows, and the largest of many scores."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.linear.operator import ALWAYS, has_product, linear

_FEW_ROWS = 128
_GROUP = 128


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight^T: [..., N, H] and [..., M, H] give [..., N, M].

    On a CPU without AMX, torch's product of short numbers takes a time of its own for each row: there ours serves,
    where no gradient is wanted. On other CPUs, oneDNN packs the right matrix anew at every call. For few rows that
    costs more than the product, so there the large matrix goes to the left (8192 x 576 in bfloat16, 4 rows: 0.6 ms in
    place of 1.0 on one core).
    """
    if torch.is_inference_mode_enabled() and rows_are_dear(weight) and has_product(weight):
        operator = linear()
        if operator is not None:
            return operator(rows, weight, None, ALWAYS)
    if rows.device.type == "cpu" and rows.shape[-2] <= _FEW_ROWS:
        return (weight @ rows.transpose(-1, -2)).transpose(-1, -2)
    return rows @ weight.transpose(-1, -2)


def rows_are_dear(weight: Tensor) -> bool:
    """Whether each row costs torch a time of its own: short numbers on a CPU that has no AMX."""
    short = weight.dtype in (torch.bfloat16, torch.float16)
    return short and weight.device.type == "cpu" and not torch.cpu._is_amx_tile_supported()


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and places of the k largest along the last dimension, descending.

    On a CPU, in two rounds: the k largest lie in the k groups with the largest maxima, so only these are searched.
    """
    size = scores.shape[-1]
    groups = size // _GROUP
    if scores.device.type != "cpu" or size % _GROUP != 0 or groups <= k:
        best = scores.topk(k, dim=-1)
        return best.values, best.indices
    grouped = scores.view(*scores.shape[:-1], groups, _GROUP)
    chosen = grouped.amax(-1).topk(k, dim=-1, sorted=False).indices
    members = grouped.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _GROUP)).flatten(-2)
    best = members.topk(k, dim=-1)
    group = chosen.gather(-1, best.indices // _GROUP)
    return best.values, group * _GROUP + best.indices % _GROUP
