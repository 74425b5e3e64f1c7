"""Weight files of a folder: names and shapes at once, values when asked. Safetensors, or pickles without code."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.json_file import NotJson, load_json

Shape = tuple[int, ...]
# Where heads lie beside their target, these files hold the heads; the later patterns are tried where they are missing.
_PATTERNS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "*.safetensors", "*.pt", "*.bin")
# What trainers leave behind: no weights, and pickles that want to run code.
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt"}
# Values of 8 bits, each tensor (or row) with a scale beside it; and what that scale is called.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RANK = re.compile(r"rank\d+\.safetensors")
# Names the file of each tensor where weights are split.
_INDEX = "model.safetensors.index.json"
# Modules that hold another one: DataParallel's, torch.compile's, FSDP's, activation checkpointing's.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
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
            MedusaError: a NaN or an infinity among them; complex numbers; FP8 values without a scale.
        """
        tensor = self._read(name)
        if tensor.is_complex():
            fix = "complex numbers are no weights; export the heads in bfloat16, float16 or float32"
            raise MedusaError.of(f"{self.files[name]}: {name}", str(tensor.dtype), fix)
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
        if scale.numel() not in (1, (*tensor.shape, 1)[0]):
            fix = f"one scale per tensor or per row is read; export {name} in bfloat16"
            raise MedusaError.of(f"{self.files[name]}: {scale_name}", list(scale.shape), fix)
        return (tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))).to(torch.bfloat16)


def open_weights(folder: Path) -> Weights:
    """Open the weights of `folder`: its medusa_lm_head file, else all .safetensors files, else all .pt or .bin files.

    Raises:
        MedusaError: no such file, a truncated or damaged one, one that is no file, a pickle that wants to run code, an
            index that names files of other places or missing ones.
    """
    for pattern in _PATTERNS:
        files = [file for file in sorted(folder.glob(pattern)) if file.name not in _NO_WEIGHTS]
        for file in files:
            _check_file(file)
        if files and pattern == "*.safetensors":
            _check_index(folder)
        if files:
            return _unwrapped(_open_safetensors(files) if pattern.endswith(".safetensors") else _open_pickles(files))
    raise MedusaError.of(
        "heads", str(folder), "holds no weights; a folder of heads has config.json and model.safetensors"
    )


def _unwrapped(weights: Weights) -> Weights:
    """The same under the names that the modules have by themselves, without those of what they were saved in."""
    stored: dict[str, str] = {}
    for name in weights.shapes:
        plain = plain_name(name)
        if plain in stored:
            fix = f"{stored[plain]} is in {weights.files[stored[plain]].name} too: the same tensor twice; keep one"
            raise MedusaError.of(f"{weights.files[name]}: tensor", name, fix)
        stored[plain] = name
    if all(plain == name for plain, name in stored.items()):
        return weights
    return Weights(
        {plain: weights.shapes[name] for plain, name in stored.items()},
        {plain: weights.files[name] for plain, name in stored.items()},
        lambda plain: weights._read(stored[plain]),
    )


def plain_name(name: str) -> str:
    """A tensor's name without the modules that trainers put around others, in any order and anywhere.

    >>> plain_name("module._orig_mod.medusa_head.0.0.linear.weight")  # data parallel, compiled
    'medusa_head.0.0.linear.weight'
    >>> plain_name("base_model.model.medusa_head.modules_to_save.default.0.1.weight")  # PEFT
    'medusa_head.0.1.weight'
    """
    parts = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return parts.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")


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
        except (SafetensorError, OSError, MemoryError) as error:
            raise _damaged(file, error) from None

    def read(name: str) -> Tensor:
        try:
            with safe_open(homes[name], framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError, MemoryError, RuntimeError, AttributeError, ValueError) as error:
            raise _damaged(homes[name], error) from None  # a number format that this torch does not have, say
        return tensor

    return Weights(shapes, homes, read)


def _open_pickles(files: list[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Path] = {}
    for file in files:
        try:
            # weights_only: a checkpoint is data, it never runs code here. What torch warns of is ours to judge.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError:
            fix = "refused: it is damaged or wants to run code; convert it to safetensors where you trust it"
            raise MedusaError.of(f"heads in {file.parent}", file.name, fix) from None
        except Exception as error:  # noqa: BLE001 (a damaged pickle is a program of its own: it may stumble anywhere)
            raise _damaged(file, error) from None
        if not isinstance(loaded, dict):
            raise MedusaError.of(f"heads in {file.parent}", file.name, "must hold a dictionary of tensors by name")
        for name, tensor in loaded.items():
            if isinstance(tensor, Tensor) and isinstance(name, str):
                _check_stored(file, name, tensor)
                tensors[name], homes[name] = tensor, file
    return Weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, homes, tensors.__getitem__)


def _check_stored(file: Path, name: str, tensor: Tensor) -> None:
    """A pickle may claim tensors of any size (strides of 0, storage made on loading): not more than the file holds."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    if not plain or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        fix = "is no plain tensor (sparse, quantised or without values); export the heads as safetensors"
        raise MedusaError.of(f"heads in {file.parent}", f"{file.name}: {name}", fix)
    if tensor.numel() * tensor.element_size() > file.stat().st_size:
        fix = f"claims {tensor.numel():,} values, more than the file holds; download the heads again"
        raise MedusaError.of(f"heads in {file.parent}", f"{file.name}: {name}", fix)


def _check_file(file: Path) -> None:
    """Opening a pipe would wait for ever, and a link may lead nowhere."""
    if not _is_file(file):
        fix = "is not a file (a folder, a pipe or a link to nowhere?); put the weights there, or remove it"
        raise MedusaError.of(f"heads in {file.parent}", file.name, fix)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder without rights
        return False


def _check_index(folder: Path) -> None:
    """Only files of this folder are ever read; an index that says otherwise, or a part that is missing, is told."""
    index = folder / _INDEX
    if not index.is_symlink() and not index.exists():
        return
    again = "download or export the weights again, or remove the index if all of them are here"
    try:
        raw = load_json(index)
    except NotJson as error:
        raise MedusaError.of(f"heads in {folder}", index.name, f"{error}; {again}") from None
    parts = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise MedusaError.of(f"{index}: weight_map", parts, f"must give a file name for each tensor; {again}")
    for part in sorted(set(parts.values())):
        if part != Path(part).name:
            raise MedusaError.of(f"{index}: weight_map", part, f"lies outside the folder, and is not read; {again}")
        if not _is_file(folder / part):
            raise MedusaError.of(f"{index}: weight_map", part, f"is missing; {again}")


def _damaged(file: Path, error: Exception) -> MedusaError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return MedusaError.of(
        f"heads in {file.parent}", file.name, f"cannot be read ({reason}); download or train the heads again"
    )
