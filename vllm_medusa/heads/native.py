"""The compiled part of the heads, for CPUs."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.compiled import CannotBuild, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_heads.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def product(rows: Tensor, weight: Tensor) -> Tensor | None:
    """rows @ weight^T for one or two rows: bound by reading the matrix once, where libraries need longer.

    Args:
        rows: bfloat16 [n, H] on a CPU.
        weight: bfloat16 [M, H].

    Returns:
        bfloat16 [n, M]; None if there is nothing compiled for this.
    """
    count, size = rows.shape
    fits = 1 <= count <= 2 and size % 32 == 0 and weight.is_contiguous() and rows.device.type == "cpu"
    if not fits or rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or (library := _load()) is None:
        return None
    rows, out = rows.contiguous(), torch.empty(count, weight.shape[0])
    library.medusa_product(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), count, weight.shape[0], size)
    return out.to(torch.bfloat16)


def best_tokens(logits: Tensor, scales: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The k largest of each row of scaled logits, best first, with their softmax probabilities.

    Args:
        logits: float32 or bfloat16 [n, V] on a CPU, of any strides.
        scales: float32 [n], above 0.
        k: at most V.

    Returns:
        Places int64 [n, k] and probabilities float32 [n, k]; None if there is nothing compiled for this.
    """
    library = _load() if logits.device.type == "cpu" and logits.dtype in _DTYPES else None
    if library is None:
        return None
    count, outputs = logits.shape
    places, probabilities = torch.empty(count, k, dtype=torch.int64), torch.empty(count, k)
    scales = scales.contiguous()
    library.medusa_best(
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


@lru_cache(maxsize=1)
def _load() -> Any:
    """The library; None, said once, where it cannot be built: torch's own operations do it then, a little slower."""
    try:
        library = load_library(_SOURCE)
    except CannotBuild as error:
        logger.info("Heads run without their compiled part: %s", error)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.medusa_best.argtypes = [address, number, address, address, address, *[number] * 5]
    library.medusa_product.argtypes = [address, address, address, number, number, number]
    library.medusa_best.restype = library.medusa_product.restype = None
    return library
