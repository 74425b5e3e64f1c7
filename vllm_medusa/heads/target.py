"""The two matrices of a target that heads share, read from its files without loading the rest."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.storage import Weights, open_weights

_PLAIN = "a quantized matrix cannot be read here; name the folder of the model before it was quantized"


def read_target(folder: str | Path) -> tuple[Tensor, Tensor]:
    """Unembedding and embedding, each [V, H], of the Hugging Face model in `folder`; one tensor twice if it ties them.

    Raises:
        MedusaError: no such folder, weights without an embedding, or quantized ones that are no matrix as they lie.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MedusaError.of("model", str(folder), "no such folder; name the folder of a Hugging Face model")
    weights = open_weights(folder)
    unembedding = _named(weights.shapes, "lm_head.weight")
    embedding = _named(weights.shapes, "embed_tokens.weight") or _named(weights.shapes, "wte.weight") or unembedding
    if embedding is None:
        fix = "its weights hold no embed_tokens or lm_head; name a decoder-only model"
        raise MedusaError.of("model", str(folder), fix)
    for name in {embedding, unembedding or embedding}:
        if len(weights.shapes[name]) != 2 or 0 in weights.shapes[name]:
            fix = "must be a matrix, a row per token; download the model again"
            raise MedusaError.of(f"{weights.files[name]}: {name}", list(weights.shapes[name]), fix)
    quantized = next((name for name in weights.shapes if re.search(r"(^|\.)lm_head\.(?!weight$|bias$)", name)), None)
    if unembedding is None and quantized is not None:
        raise MedusaError.of(f"{weights.files[quantized]}", quantized, _PLAIN)
    read = _numbers(weights, embedding)
    return (read if unembedding in (None, embedding) else _numbers(weights, unembedding)), read


def _numbers(weights: Weights, name: str) -> Tensor:
    read = weights.read(name)
    if not read.is_floating_point():
        raise MedusaError.of(f"{weights.files[name]}: {name}", str(read.dtype), _PLAIN)
    return read


def _named(names: dict[str, tuple[int, ...]], ending: str) -> str | None:
    return next((name for name in names if name == ending or name.endswith("." + ending)), None)
