"""The compiled part of the heads, for CPUs."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.compiled import load_library, loaded_once

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_heads.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def best_tokens(logits: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The k largest of each row of scaled logits, best first, with their softmax probabilities.

    Args:
        logits: float32 or bfloat16 [n, V] on a CPU, of any strides.
        scales: float32 [n], above 0.
        k: at most V.

    Returns:
        Places int64 [n, k] and probabilities float32 [n, k]; None if there is nothing compiled for this.
    """
    compiled = library() if logits.device.type == "cpu" and logits.dtype in _DTYPES else None
    if compiled is None:
        return None
    count, outputs = logits.shape
    places, probabilities = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    scales = scales.contiguous()
    compiled.medusa_best(
        logits.data_ptr(),
        _DTYPES[logits.dtype],
        scales.data_ptr(),
        places.data_ptr(),
        probabilities.data_ptr(),
        count,
        outputs,
        logits.stride(0),
        logits.stride(1),
        k,
    )
    return places, probabilities


@loaded_once(logger, logging.INFO, "Heads run without their compiled part: %s")
def library() -> Any:
    """What cpu_heads.cpp exports; where it cannot be built, torch's operations do the same, slower."""
    loaded = load_library(_SOURCE)
    address, number = ctypes.c_void_p, ctypes.c_int64
    loaded.medusa_best.argtypes = [address, number, address, address, address, *[number] * 5]
    loaded.medusa_guess.argtypes = [*[address] * 5, number, number]
    loaded.medusa_best.restype = loaded.medusa_guess.restype = None
    return loaded
