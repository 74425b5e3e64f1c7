"""The product of a model's linear layers, as an operator of torch that compiled graphs may hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vllm_medusa.compiled import load_operators, loaded_once

logger = logging.getLogger(__name__)

ROWS = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    512,
)  # bit i of a mask stands for the numbers of rows above ROWS[i - 1], to ROWS[i]
ALWAYS = (1 << len(ROWS)) - 1  # the last bit stands for all larger numbers too
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Linear = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


@loaded_once(logger, logging.WARNING, "Linear layers keep vLLM's product, which may make each row of a tree dear: %s")
def linear() -> Linear:
    """The product `linear(rows, weight, bias, mask)`; None, said once, where it cannot be built.

    It gives rows [..., K] times weight [N, K] transposed plus bias [N], all of one dtype of `DTYPES`: [..., N]. Sums
    are taken in float32. For numbers of rows whose bit in `mask` is 0 it is `torch.nn.functional.linear`; for the
    others each row's result is the same to the bit, whatever other rows there are.

    >>> from vllm_medusa.linear.operator import ALWAYS, linear
    >>> linear()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), None, ALWAYS)
    tensor([[11., 17.]])
    """
    load_operators(Path(__file__).with_name("cpu_linear.cpp"))
    operator = torch.ops.vllm_medusa.linear.default
    torch.library.register_fake("vllm_medusa::linear", _nothing)

    def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, mask: int) -> Tensor:
        out = torch.empty((*rows.shape[:-1], weight.shape[0]), dtype=rows.dtype)
        operator(out, rows, weight, bias, mask)
        return out

    return multiply


def place_of(rows: int) -> int:
    """Which bit of a mask stands for this number of rows.

    >>> [place_of(rows) for rows in (1, 2, 3, 128, 129, 4096)]
    [0, 1, 2, 7, 8, 8]
    """
    return next((place for place, most in enumerate(ROWS) if rows <= most), len(ROWS) - 1)


def has_product(weight: Tensor) -> bool:
    """Whether our product takes this weight: a dense matrix on a CPU, in a format that it knows."""
    return weight.device.type == "cpu" and weight.ndim == 2 and weight.dtype in DTYPES and weight.is_contiguous()


def _nothing(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, mask: int) -> None:
    """What the operator does to shapes, as compiled graphs need to know it."""
