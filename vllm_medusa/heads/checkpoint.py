"""Heads in and out of folders: ours (config.json and model.safetensors) both ways, and what others write.

Read, converted or not: vLLM's own Medusa format up to 0.32, FasterDecoding, TGI v2, TensorRT Model Optimizer (see
layouts.py). Written: ours, and vLLM's for plain heads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import Calibration, HeadsConfig, is_padding
from vllm_medusa.heads.foreign import EMBEDDED
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.opening import CONFIG, open_folder, read_json
from vllm_medusa.heads.storage import Weights
from vllm_medusa.heads.vllm_format import check_sayable, to_vllm

WEIGHTS = "model.safetensors"


def read_config(path: str | Path) -> HeadsConfig:
    """What the heads in folder `path` are, checked against the shapes (not the values) of their weights.

    Raises:
        MedusaError: a missing or damaged file, a missing tensor, a wrong shape, a config that cannot be.
    """
    return open_folder(Path(path)).config


def load_heads(path: str | Path, *, draft_vocab: bool = True) -> MedusaHeads:
    """Heads from folder `path`, not bound to a target yet, in the dtype they were saved in.

    Args:
        path: a folder in our format or one of the others.
        draft_vocab: False makes heads that share the target's unembedding guess in the whole vocabulary.

    Raises:
        MedusaError: what `read_config` refuses, NaN or infinite weights, a token map out of range, or
            `draft_vocab=False` for heads whose own unembedding is reduced.
    """
    config, plan, weights, _ = open_folder(Path(path))
    state = {name: _read(weights, name, sources) for name, sources in plan.items()}
    token_map = state.get("token_map")
    if token_map is not None:
        state["token_map"] = token_map = _checked_map(token_map, config, weights.files[plan["token_map"][0]])
        if "unembedding" in state and state["unembedding"].shape[1] != config.draft_vocab_size:
            # Checkpoints may keep a whole unembedding beside a token map.
            state["unembedding"] = state["unembedding"][:, token_map].contiguous()
    if not draft_vocab and config.draft_vocab_size is not None:
        if config.unembedding != "target":
            fix = (
                "these heads bring their own unembedding, for their reduced vocabulary only; leave draft_vocab at true"
            )
            raise MedusaError.of("draft_vocab", False, fix)
        config = config.model_copy(update={"draft_vocab_size": None})
        del state["token_map"]
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(state, assign=True)
    return heads.requires_grad_(False).eval()


def save_heads(heads: MedusaHeads, path: str | Path) -> Path:
    """Write `heads` in our format; a bound target's unembedding is not written. Returns the folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, heads.config.model_dump(mode="json", exclude_none=True), heads.state_dict())
    return folder


def save_vllm(heads: MedusaHeads, path: str | Path, unembedding: Tensor | None = None) -> Path:
    """Write plain heads in the format of vLLM up to 0.32. Returns the folder.

    Args:
        heads: heads with an unembedding of their own, or bound to their target.
        path: folder to write.
        unembedding: [V, H], the target's lm_head, for heads that share it. Written whole, so that vLLM guesses in the
            whole vocabulary: its version 0.32 refuses every token map. Without it, bound heads write what they use.

    Raises:
        MedusaError: heads that vLLM's format cannot say; heads that share an unembedding that is not given.
    """
    check_sayable(heads.config)
    if unembedding is not None and heads.config.unembedding == "target":
        written, vocab_size = unembedding[None], unembedding.shape[0]
    else:
        written = heads.unembedding_weight() if heads.unembedding is None else heads.unembedding.data
        vocab_size = heads.config.vocab_size
    raw, tensors = to_vllm(heads.config, heads.state_dict(), written, vocab_size)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, raw, tensors)
    return folder


def check_heads(config: HeadsConfig, hidden_size: int, vocab_size: int) -> None:
    """Whether heads fit a target of these sizes; either vocabulary may be padded beyond the other.

    Raises:
        MedusaError: they do not.
    """
    made_for = f" (made for {config.base_model})" if config.base_model else ""
    if config.hidden_size != hidden_size:
        fix = f"the target's rows have {hidden_size}; use heads trained for this target{made_for}"
        raise MedusaError.of("heads' hidden_size", config.hidden_size, fix)
    if config.vocab_size > vocab_size and not is_padding(config.vocab_size, vocab_size):
        fix = f"the target knows {vocab_size} tokens; use heads trained for this target{made_for}"
        raise MedusaError.of("heads' vocab_size", config.vocab_size, fix)


def save_calibration(path: str | Path, calibration: Calibration, config: HeadsConfig) -> None:
    """Put `calibration` into config.json of the heads in `path`; nothing else of the folder changes.

    The file is replaced at once, so whoever reads it meanwhile sees the old one or the new one. Folders that are not in
    our format get our whole config under one more key, which other readers pass over.

    Args:
        path: the folder.
        calibration: figures that fit the heads.
        config: what the heads are, as bound to their target.

    Raises:
        MedusaError: a config.json that cannot be read or written.
    """
    file = Path(path) / CONFIG
    raw = read_json(file)
    whole = config.model_copy(update={"calibration": calibration}).model_dump(mode="json", exclude_none=True)
    if "format" in raw:
        raw["calibration"] = whole["calibration"]
    else:
        raw[EMBEDDED] = whole
    try:
        _write_json(file, raw)
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); make room or give yourself the right, and calibrate again"
        raise MedusaError.of("heads", str(file), fix) from None


def _read(weights: Weights, name: str, sources: list[str]) -> Tensor:
    if name == "token_map":
        return weights.read(sources[0])
    tensors = [weights.read(source) for source in sources]
    for source, tensor in zip(sources, tensors, strict=True):
        if not tensor.is_floating_point():
            fix = "is packed in a way that cannot be read; export the heads in bfloat16, float16 or float32"
            raise MedusaError.of(f"{weights.files[source]}: {source}", str(tensor.dtype), fix)
    return tensors[0] if sources == [name] else torch.stack(tensors)


def _checked_map(token_map: Tensor, config: HeadsConfig, file: Path) -> Tensor:
    """int64 [Vd], distinct token ids below V."""
    if token_map.is_floating_point() or token_map.dtype == torch.bool or token_map.ndim != 1:
        raise MedusaError.of(
            f"{file}: token_map", str(token_map.dtype), "must hold token ids, whole numbers in one row"
        )
    ids = token_map.to(torch.int64)
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < config.vocab_size:
            raise MedusaError.of(
                f"{file}: token_map", extreme, f"token ids lie between 0 and {config.vocab_size - 1}; export them again"
            )
    if len(set(ids.tolist())) != ids.numel():
        raise MedusaError.of(f"{file}: token_map", ids.numel(), "the same token appears twice; each may stand once")
    return ids


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    # Weights first, under another name: a killed writer leaves no folder that half reads.
    partial = folder / f"{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / WEIGHTS)
    _write_json(folder / CONFIG, config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    # Hub caches keep files as links to one store: replace what is read, not the link to it.
    file = file.resolve()
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if file.exists():
            partial.chmod(file.stat().st_mode)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
