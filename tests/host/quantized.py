"""Tiny quantized checkpoints in the layouts of those who publish them, made from a plain folder's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUP = 32
Tensors = dict[str, Tensor]


def save_quantized(plain: Path, folder: Path, kind: str, *, lm_head: bool) -> Path:
    """Write the model in the folder `plain` quantized by a kind of KINDS, `lm_head` too or not; returns `folder`."""
    from safetensors.torch import load_file, save_file

    quantize, config = KINDS[kind]
    shutil.copytree(plain, folder)
    weights = load_file(folder / "model.safetensors")
    written: Tensors = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") or (lm_head and layer == "lm_head"):
            written |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in quantize(weight.float()).items()}
        else:
            written[name] = weight
    save_file(written, folder / "model.safetensors")
    given = json.loads((folder / "config.json").read_text())
    given["quantization_config"] = config(lm_head)
    (folder / "config.json").write_text(json.dumps(given))
    return folder


def _int8(weight: Tensor) -> Tensors:
    """Bytes with a scale for each row of [N, K]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _fp8(weight: Tensor) -> Tensors:
    """Eight-bit floats with a scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_by_tensor(weight: Tensor) -> Tensors:
    """Eight-bit floats with one scale."""
    scale = weight.abs().amax() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.reshape(1)}


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers 0 to 15 [N, K], 8 for nothing, and a scale for each group of each row [N, K / GROUP]."""
    grouped = weight.view(len(weight), -1, GROUP)
    scale = grouped.abs().amax(dim=2) / 7
    return ((grouped / scale[..., None]).round() + 8).clamp(0, 15).to(torch.int32).view_as(weight), scale


def _packed(numbers: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Eight numbers of the last dimension in each int32, the first in the lowest bits."""
    eights = numbers.view(*numbers.shape[:-1], -1, 8)[..., list(order)].to(torch.int64)
    word = (eights << (4 * torch.arange(8))).sum(dim=-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def _pack_quantized(weight: Tensor) -> Tensors:
    numbers, scale = _in_groups(weight)
    return {"weight_packed": _packed(numbers), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _gptq(weight: Tensor) -> Tensors:
    numbers, scale = _in_groups(weight)
    return {
        "qweight": _packed(numbers).T,
        "qzeros": _packed(torch.full_like(scale.T, 7).to(torch.int32)),
        "scales": scale.T.to(torch.float16),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def _awq(weight: Tensor) -> Tensors:
    numbers, scale = _in_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _packed(numbers.T.contiguous(), order),
        "qzeros": _packed(torch.full_like(scale.T, 8).to(torch.int32), order),
        "scales": scale.T.to(torch.float16),
    }


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Callable[[bool], dict[str, Any]]:
    def config(lm_head: bool) -> dict[str, Any]:
        targets = ["Linear", "re:.*lm_head"] if lm_head else ["Linear"]
        group = {"targets": targets, "weights": weights, "input_activations": inputs}
        ignored = [] if lm_head else ["lm_head"]
        return {
            "quant_method": "compressed-tensors", "format": form, "ignore": ignored, "config_groups": {"group_0": group}
        }  # fmt: skip

    return config


_ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKENS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_FOURS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
KINDS: dict[str, tuple[Callable[[Tensor], Tensors], Callable[[bool], dict[str, Any]]]] = {
    "int8 (compressed-tensors)": (
        _int8,
        _compressed("int-quantized", {**_ROWS, "type": "int"}, {**_TOKENS, "type": "int"}),
    ),
    "fp8 (compressed-tensors)": (
        _fp8,
        _compressed("float-quantized", {**_ROWS, "type": "float"}, {**_TOKENS, "type": "float"}),
    ),
    "int4 (compressed-tensors)": (_pack_quantized, _compressed("pack-quantized", _FOURS, None)),
    "GPTQ": (
        _gptq,
        lambda lm_head: {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": lm_head
        },
    ),
    "AWQ": (
        _awq,
        lambda lm_head: {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "lm_head": lm_head,
        },
    ),
    "fp8": (_fp8_by_tensor, lambda lm_head: {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}  # fmt: skip
