"""The compiled part of lookup, growth and the greedy walk."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.compiled import load_library, loaded_once

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

_SOURCE = Path(__file__).with_name("cpu_trees.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def greedy_walk(
    logits: Tensor, first: Ints, walks: npt.NDArray[np.bool_], tokens: Ints, parents: Ints, sizes: Ints
) -> tuple[Ints, Ints, Ints] | None:
    """`walk.greedy_walk` over rows of logits of which only those that are reached are looked at.

    Args:
        logits: float32 or bfloat16 [rows, V] on a CPU, rows dense.
        first: int64 [B], each request's root among the rows; its nodes follow.
        walks: bool [B], False for requests that stop at their root.
        tokens, parents: int64 [B, N]; sizes: int64 [B].

    Returns:
        Rows int64 [B, D + 1] and emitted tokens int64 [B, D + 1] of the paths, both padded with -1, and their lengths
        int64 [B]. None if there is nothing compiled for this, or a NaN among the logits.
    """
    library = load() if logits.device.type == "cpu" and logits.dtype in _DTYPES and logits.stride(1) == 1 else None
    if library is None:
        return None
    batch, width = tokens.shape
    rows, emitted = np.full((2, batch, width + 1), -1, dtype=np.int64)
    lengths = np.empty(batch, dtype=np.int64)
    given = [np.ascontiguousarray(part) for part in (first, walks, tokens, parents, sizes)]
    numbers = library.medusa_greedy_walk(
        *(logits.data_ptr(), _DTYPES[logits.dtype], logits.stride(0), logits.shape[1]),
        *(part.ctypes.data for part in given),
        *(batch, width, rows.ctypes.data, emitted.ctypes.data, lengths.ctypes.data),
    )
    if not numbers:
        return None
    longest = int(lengths.max(initial=1))
    return rows[:, :longest], emitted[:, :longest], lengths


@loaded_once(logger, logging.INFO, "Trees grow without their compiled part: %s")
def load() -> Any:
    """The library of the three; where it cannot be built, Python does the same, some tenths of a millisecond slower per
    request and step."""
    library = load_library(_SOURCE)
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.medusa_follow.argtypes = [
        *(address, number, address, address, number, number, number, ctypes.c_double),
        *(number, address, address),
    ]
    library.medusa_grow.argtypes = [*[address] * 4, *[number] * 5, *[address] * 5]
    library.medusa_greedy_walk.argtypes = [
        *(address, number, number, number),
        *[address] * 5,
        *(number, number, address, address, address),
    ]
    library.medusa_greedy_walk.restype = number
    library.medusa_follow.restype = library.medusa_grow.restype = None
    return library
