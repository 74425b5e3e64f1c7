"""The look at the kernels before serving: it passes right ones, and finds wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import load_interpreted, spoil

from vllm_medusa.errors import MedusaError

MODULES = ("triton_kernels", "triton", "triton_mover", "triton_check")
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 32, "block_size": 16, "num_nodes": 9}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_pass(dtype: torch.dtype) -> None:
    check = load_interpreted(*MODULES).check_kernels
    check(CPU, dtype, **SHAPE)
    check(CPU, dtype, **SHAPE | {"num_nodes": 70, "sliding_window": 20, "softcap": 5.0})
    check(CPU, dtype, **SHAPE | {"sinks": True, "stored": torch.float8_e4m3fn})


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(word >> (node % 64)[None, :]) & 1) != 0", "(word >> (node % 64)[None, :]) & 1) == 0"),
        ("context + depth - window  #", "context + depth - window - 1  #"),
        ("if SINKS and SPLITS == 1", "if SINKS and SPLITS == 0"),
        ("if VALUE_SCALES > 0", "if VALUE_SCALES > 1"),
    ],
    ids=["mask", "window", "sinks", "scales"],
)
def test_wrong_attention_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    spoilt = spoil("triton_kernels", right, wrong, tmp_path)
    check = load_interpreted(*MODULES, spoilt=spoilt).check_kernels
    with pytest.raises(MedusaError, match=r"this device \(cpu\) tree attention is off by"):
        check(CPU, torch.float32, **SHAPE | {"sliding_window": 8, "sinks": True, "stored": torch.float8_e5m2})


def test_a_wrong_commit_is_refused(tmp_path: Path) -> None:
    spoilt = spoil("triton_mover", "target % BLOCK * token_stride", "source % BLOCK * token_stride", tmp_path)
    order = ("triton_mover", "triton_kernels", "triton", "triton_check")
    with pytest.raises(MedusaError, match="the commit moves other tokens"):
        load_interpreted(*order, spoilt=spoilt).check_kernels(CPU, torch.float32, **SHAPE)
