"""Weight files of a folder: names and shapes at once, values when asked. Safetensors, or pickles without code."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_medusa.errors import MedusaError

Shape = tuple[int, ...]
# Where heads lie beside their target, these files hold the heads; the later patterns are tried where they are missing.
_PATTERNS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors", "*.pt", "*.bin")
# What trainers leave behind: no weights, and pickles that want to run code.
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt"}
# Values of 8 bits, each tensor (or row) with a scale beside it; and what that scale is called.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RANK = re.compile(r"rank\d+\.safetensors")
_SCALES = ("_scale", "s_scaling_factor")


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder.

    Attributes:
        shapes: shape of every tensor, by name.
        files: the file each tensor is in, by name (for messages).
    """

    shapes: dict[str, Shape]
    files: dict[str, Path]
    _read: Callable[[str], Tensor]

    def read(self, name: str) -> Tensor:
        """The values of one tensor; FP8 values with their scale applied, in bfloat16.

        Raises:
            MedusaError: a NaN or an infinity among them; FP8 values without a scale.
        """
        tensor = self._read(name)
        if tensor.dtype in _FP8:
            tensor = self._scaled(name, tensor)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            fix = "holds NaN or infinite values; train or download the heads again"
            raise MedusaError.of(f"{self.files[name]}: {name}", list(tensor.shape), fix)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Number format of one tensor."""
        return self._read(name).dtype

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        scale_name = next((name + ending for ending in _SCALES if name + ending in self.shapes), None)
        if scale_name is None:
            fix = f"FP8 values need their scale, {name}{_SCALES[0]}; export the heads in bfloat16"
            raise MedusaError.of(f"{self.files[name]}: {name}", str(tensor.dtype), fix)
        scale = self._read(scale_name).float()
        if scale.numel() not in (1, tensor.shape[0]):
            fix = f"one scale per tensor or per row is read; export {name} in bfloat16"
            raise MedusaError.of(f"{self.files[name]}: {scale_name}", list(scale.shape), fix)
        return (tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))).to(torch.bfloat16)


def open_weights(folder: Path) -> Weights:
    """Open the weights of `folder`: its medusa_lm_head file, else all .safetensors files, else all .pt or .bin files.

    Raises:
        MedusaError: no such file, a truncated or damaged one, a pickle that wants to run code.
    """
    for pattern in _PATTERNS:
        files = [file for file in sorted(folder.glob(pattern)) if file.name not in _NO_WEIGHTS]
        if files and pattern.endswith(".safetensors"):
            return _open_safetensors(files)
        if files:
            return _open_pickles(files)
    raise MedusaError.of(
        "heads", str(folder), "holds no weights; a folder of heads has config.json and model.safetensors"
    )


def _open_safetensors(files: list[Path]) -> Weights:
    shapes: dict[str, Shape] = {}
    homes: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    if name in homes and _RANK.fullmatch(file.name):
                        fix = f"is in {homes[name].name} too: split for tensor parallelism; export for one rank"
                        raise MedusaError.of(f"{file}: tensor", name, fix)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
                    homes[name] = file
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from None

    def read(name: str) -> Tensor:
        with safe_open(homes[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    return Weights(shapes, homes, read)


def _open_pickles(files: list[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Path] = {}
    for file in files:
        try:
            # weights_only: a checkpoint is data, it never runs code here.
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError:
            fix = "refused: it is damaged or wants to run code; convert it to safetensors where you trust it"
            raise MedusaError.of(f"heads in {file.parent}", file.name, fix) from None
        except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise _damaged(file, error) from None
        if not isinstance(loaded, dict):
            raise MedusaError.of(f"heads in {file.parent}", file.name, "must hold a dictionary of tensors by name")
        for name, tensor in loaded.items():
            if isinstance(tensor, Tensor):
                tensors[str(name)], homes[str(name)] = tensor, file
    return Weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, homes, tensors.__getitem__)


def _damaged(file: Path, error: Exception) -> MedusaError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return MedusaError.of(
        f"heads in {file.parent}", file.name, f"cannot be read ({reason}); download or train the heads again"
    )
