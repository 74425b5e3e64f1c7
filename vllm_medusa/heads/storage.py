"""Weight files of a folder: names and shapes at once, values when asked. Safetensors, or pickles without code."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_medusa.errors import MedusaError

Shape = tuple[int, ...]
_PICKLES = ("*.pt", "*.bin")


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
        """The values of one tensor.

        Raises:
            MedusaError: a NaN or an infinity among them.
        """
        tensor = self._read(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            fix = "holds NaN or infinite values; train or download the heads again"
            raise MedusaError.of(f"{self.files[name]}: {name}", list(tensor.shape), fix)
        return tensor


def open_weights(folder: Path) -> Weights:
    """Open every .safetensors file of `folder`, or its .pt and .bin files where there is none.

    Raises:
        MedusaError: no such file, a truncated or damaged one, a pickle that wants to run code.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _open_safetensors(files)
    files = [file for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
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
            loaded = torch.load(file, map_location="cpu", weights_only=True)
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
