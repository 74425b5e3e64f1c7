"""How others name the tensors of Medusa heads, brought to one spelling: that of vLLM up to 0.32.

    blocks.{k}.layers.{j}.weight        lm_heads.{k}.weight            vLLM; lm_head.weight for all, token_map
    {k}.{j}.linear.weight               {k}.{n}.weight                 FasterDecoding; TGI's second kind has no {n}
    medusa_heads.{k}.{j}.linear.weight  medusa_heads.{k}.{n}.weight    TensorRT Model Optimizer, Hugging Face export
    medusa_heads.{k}.medusa_layers.{j}.linear.weight
                                        medusa_heads.{k}.lm_head.weight    the same, TensorRT-LLM export

k counts heads, j residual blocks, n is the number of blocks; biases end in .bias. `medusa_head.` stands before the
names where heads were saved inside their target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_medusa.errors import MedusaError

Origin = Literal["vLLM", "FasterDecoding", "TGI v2", "TensorRT Model Optimizer"]

_PREFIX = r"(?:(?:model\.)?medusa_heads?\.)?"
_COUNT = r"(0|[1-9][0-9]{0,3})"  # heads and blocks are counted in tens
_BLOCK = re.compile(rf"{_PREFIX}{_COUNT}\.(?:medusa_layers\.)?{_COUNT}\.linear\.(\w+)")
_UNEMBEDDING = re.compile(rf"{_PREFIX}{_COUNT}\.(?:{_COUNT}|lm_head)\.(\w+)")
_MODERN_BLOCK = re.compile(rf"blocks\.{_COUNT}\.layers\.{_COUNT}\.(?:weight|bias)")
_MODERN = re.compile(rf"lm_heads\.{_COUNT}\.weight|lm_head\.weight|token_map")


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint that belong to its heads.

    Attributes:
        origin: whose layout it is.
        spelt: the checkpoint's own name of each tensor, by vLLM's name.
        num_heads: K, heads that the weights hold, numbered from 0 without a gap.
        stored_layers: residual blocks per head that the weights hold.
        num_layers: residual blocks per head, where the weights tell: a head of several layers may be one block that
            is repeated, and files without duplicates then hold it once.
    """

    origin: Origin
    spelt: Mapping[str, str]
    num_heads: int
    stored_layers: int
    num_layers: int | None

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor that vLLM calls `name`."""
        return name in self.spelt

    def source(self, *names: str) -> str:
        """The checkpoint's name of the first of these that it holds; the first one as it is if it holds none."""
        return next((self.spelt[name] for name in names if name in self.spelt), names[0])


def find_layout(names: Iterable[str], raw: Mapping[str, Any], where: str) -> Layout:
    """Recognise whose layout the tensors `names` follow.

    Args:
        names: all tensors of the checkpoint, a whole target's among them or not.
        raw: its config.json.
        where: the folder, for messages.

    Raises:
        MedusaError: no heads among them; a head or a block missing between others; weights packed into 4 bits.
    """
    spelt: dict[str, str] = {}
    blocks: dict[int, set[int]] = {}
    depths: set[int] = set()
    origin: Origin = "FasterDecoding"
    for name in names:
        plain = name.removeprefix("medusa_heads.")
        if match := _MODERN_BLOCK.fullmatch(plain):
            origin = "vLLM"
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
        elif match := _BLOCK.fullmatch(name):
            if match[3] == "weight_scale_2":
                fix = "is packed into 4 bits (NVFP4), which cannot be read; export the heads in bfloat16 or FP8"
                raise MedusaError.of(f"{where}: tensor", name, fix)
            plain = f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
        elif match := _UNEMBEDDING.fullmatch(name):
            plain = f"lm_heads.{match[1]}.{match[3]}"
            if match[2] is not None:
                depths.add(int(match[2]))
        elif not _MODERN.fullmatch(plain):
            continue
        spelt.setdefault(plain, name)
    heads = set(blocks) or {int(name.split(".")[1]) for name in spelt if name.startswith("lm_heads.")}
    if not heads:
        fix = (
            "none of its tensors is named like a Medusa head (see vllm_medusa/heads/layouts.py); name a folder of heads"
        )
        raise MedusaError.of("heads", where, fix)
    if any(name.startswith("lm_heads.") for name in spelt.values()):
        origin = "vLLM"
    _check_counts(blocks, heads, where)
    stored = max((len(found) for found in blocks.values()), default=0)
    if isinstance(raw.get("medusa"), Mapping) or any(".medusa_layers." in name for name in spelt.values()):
        origin = "TensorRT Model Optimizer"
    elif origin == "FasterDecoding" and not any(name.startswith("lm_heads.") for name in spelt):
        origin = "TGI v2"
    return Layout(origin, spelt, len(heads), stored, max(depths) if depths and origin != "vLLM" else None)


def _check_counts(blocks: Mapping[int, set[int]], heads: set[int], where: str) -> None:
    """Heads and blocks are numbered from 0 without a gap, and all heads have as many blocks."""
    fix = "is missing while later ones are there; download the heads again, all files of one training"
    for head in range(max(heads)):
        if head not in heads:
            raise MedusaError.of(f"{where}: tensor", f"blocks.{head}.layers.0.weight", fix)
    layers = max((max(found) for found in blocks.values()), default=-1) + 1
    for head, found in blocks.items():
        for layer in range(layers):
            if layer not in found:
                raise MedusaError.of(f"{where}: tensor", f"blocks.{head}.layers.{layer}.weight", fix)
