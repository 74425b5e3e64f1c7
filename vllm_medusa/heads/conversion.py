"""Heads from one folder's format into another's, checked by reading back what was written."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, load_heads, save_heads, save_vllm
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.opening import open_folder
from vllm_medusa.heads.source import locate_heads, locate_target
from vllm_medusa.heads.target import read_target
from vllm_medusa.heads.vllm_format import check_sayable

Format = Literal["ours", "vllm"]
FORMATS: tuple[Format, ...] = ("ours", "vllm")
_NOTES = {
    ("vllm", "target"): "vLLM guesses with these heads in the whole vocabulary; vllm-medusa still in the reduced one",
    ("vllm", "shared"): "vLLM 0.32 itself refuses reduced vocabularies (token_map); older versions may load this",
}
# What people wrote about the heads, and under which terms they may be used, goes with them.
_KEPT = ("README.md", "LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class Conversion:
    """What was converted.

    Attributes:
        folder: where the heads are now.
        origin: whose layout they were read from.
        config: what they are.
        tensors: how many tensors were read back and compared, bit by bit.
        kept: files that were copied as they are.
        note: what the user should know about the result, else "".
    """

    folder: Path
    origin: str
    config: HeadsConfig
    tensors: int
    kept: tuple[str, ...]
    note: str = ""


def convert(source: str, folder: Path, to: str, model: str | None = None) -> Conversion:
    """Write the heads of `source` into `folder` in another format. Nothing is left behind where that fails.

    Args:
        source: a folder or hub id, in any format that `load_heads` reads.
        folder: a new or empty folder.
        to: "ours" or "vllm".
        model: the target, a folder or hub id; needed for vLLM's format if the heads share its unembedding. Given, the
            heads are checked against it, and what they do not say of it is filled in.

    Raises:
        MedusaError: heads that cannot be read, do not fit `model`, or cannot be said in the format asked for; a
            folder that cannot be written.
    """
    folder = folder.absolute()
    if to not in FORMATS:
        raise MedusaError.of("to", to, f"choose {' or '.join(FORMATS)}")
    if os.path.lexists(folder) and (not folder.is_dir() or folder.is_symlink() or any(folder.iterdir())):
        raise MedusaError.of("dst", str(folder), "holds something already; name a new folder")
    read = locate_heads(source)
    origin, heads = open_folder(read).origin, load_heads(read)
    unembedding = None if model is None else _fit(heads, model)
    if to == "vllm":
        check_sayable(heads.config)
    if to == "vllm" and heads.config.unembedding == "target" and unembedding is None:
        fix = "vLLM's format needs the unembedding that these heads share with their target: name it by --model"
        raise MedusaError.of("model", None, fix)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if to == "ours":
            save_heads(heads, partial)
        else:
            save_vllm(heads, partial, unembedding)
        compared = _compare(heads, load_heads(partial))
        kept = [file for pattern in _KEPT for file in sorted(read.glob(pattern)) if _belongs(file)]
        for file in kept:
            shutil.copyfile(file, partial / file.name)
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = f"cannot be written ({reason}); name a new folder where you may write"
        raise MedusaError.of("dst", str(folder), fix) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    note = _NOTES.get((to, heads.config.unembedding), "") if heads.config.draft_vocab_size else ""
    return Conversion(folder, origin, heads.config, compared, tuple(file.name for file in kept), note)


def _belongs(file: Path) -> bool:
    """A file of the folder itself, or of the hub's cache, which keeps links: others are not ours to copy."""
    real = file.resolve()
    in_cache = file.parent.parent.name == "snapshots" and real.parent == file.parent.parent.with_name("blobs").resolve()
    return file.is_file() and (real.parent == file.parent.resolve() or in_cache)


def _fit(heads: MedusaHeads, model: str) -> Tensor:
    """The target's unembedding [V, H] in the heads' number format; V and the target's name go into their config."""
    unembedding = read_target(locate_target(model)).unembedding
    vocab_size, hidden_size = unembedding.shape
    check_heads(heads.config, hidden_size, vocab_size)
    known = {"vocab_size": heads.config.vocab_size or vocab_size}
    named = {"base_model": heads.config.base_model or Path(model).name}
    heads.config = heads.config.model_copy(update={**known, **named})
    return unembedding.to(next(heads.parameters()).dtype)


def _compare(written: MedusaHeads, read: MedusaHeads) -> int:
    """Number of tensors, all equal bit by bit."""
    before, after = written.state_dict(), read.state_dict()
    # A plain raise, not MedusaError: nothing a user did leads here.
    if written.config != read.config or before.keys() != after.keys():
        raise RuntimeError(f"heads read back differ from those written: {read.config} instead of {written.config}")
    for name, tensor in before.items():
        if tensor.dtype != after[name].dtype or not torch.equal(tensor, after[name]):
            raise RuntimeError(f"tensor {name} read back differs from the one written")
    return len(before)
