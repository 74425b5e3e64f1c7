"""A folder of heads, opened: what they are and where each tensor comes from, checked without reading values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import FORMAT, HeadsConfig
from vllm_medusa.heads.foreign import Plan, read_foreign
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.storage import Shape, Weights, open_weights
from vllm_medusa.json_file import NotJson, load_json

CONFIG = "config.json"


class OpenedHeads(NamedTuple):
    """Heads whose config and shapes fit each other.

    Attributes:
        config: what they are.
        plan: the checkpoint's tensors that make up each of ours.
        weights: the checkpoint's tensors.
        origin: whose layout the folder follows.
    """

    config: HeadsConfig
    plan: Plan
    weights: Weights
    origin: str


def open_folder(folder: Path) -> OpenedHeads:
    """Open the heads in `folder`, whoever wrote them.

    Raises:
        MedusaError: a missing or damaged file, a missing tensor, a wrong shape, a config that cannot be.
    """
    if not folder.is_dir():
        raise MedusaError.of(
            "heads", str(folder), "no such folder; name the folder that holds config.json and the weights"
        )
    try:
        os.listdir(os.path.join(folder, "."))  # through the folder: needs the right to list it and to enter it
    except OSError:
        raise MedusaError.of("heads", str(folder), "may not be read; change the folder's rights, or copy it") from None
    raw = read_json(folder / CONFIG)
    weights = open_weights(folder)
    where = str(folder / CONFIG)
    if "format" in raw:
        if raw["format"] != FORMAT:
            raise MedusaError.of(
                f"{where}: format", raw["format"], f"this version reads {FORMAT!r}; update vllm-medusa"
            )
        config = HeadsConfig.parse(raw, where)
        opened = OpenedHeads(config, {name: [name] for name in _shapes(config)}, weights, FORMAT)
    else:
        config, plan, layout = read_foreign(raw, weights.shapes, where)
        opened = OpenedHeads(config, plan, weights, layout.origin)
    if not opened.plan:
        fix = "such heads have no weights, all of them guess what the target's own row says; give trained heads"
        raise MedusaError.of(f"{where}: num_layers", config.num_layers, fix)
    _check_shapes(opened, folder)
    return opened


def read_json(file: Path) -> dict[str, Any]:
    """The object that a folder's config.json holds.

    Raises:
        MedusaError: no such file, or no JSON object in it.
    """
    if not os.path.lexists(file):
        raise MedusaError.of("heads", str(file.parent), f"holds no {file.name}; name a folder of heads")
    try:
        raw = load_json(file)
    except NotJson as error:
        fix = f"{error}; correct it, or download or train the heads again"
        raise MedusaError.of(f"heads in {file.parent}", file.name, fix) from None
    if not isinstance(raw, dict):
        raise MedusaError.of(f"heads in {file.parent}", file.name, "must hold one JSON object")
    return raw


def _shapes(config: HeadsConfig) -> dict[str, Shape]:
    """Shape of each of our tensors."""
    with torch.device("meta"):
        heads = MedusaHeads(config)
    return {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}


def _check_shapes(opened: OpenedHeads, folder: Path) -> None:
    config, plan, weights, _ = opened
    for name, wanted in _shapes(config).items():
        sources = plan[name]
        single = wanted if sources == [name] else wanted[1:] if name != "token_map" else wanted
        for source in sources:
            shape = weights.shapes.get(source)
            if shape is None:
                fix = f"is missing; the config says {config.num_heads} heads of {config.num_layers} layers: give both"
                raise MedusaError.of(f"{folder}: tensor", source, f"{fix} files of the same training")
            # Checkpoints may keep a whole unembedding beside a token map: it is cut when loaded.
            whole = (*single[:-2], config.vocab_size, config.hidden_size) if name == "unembedding" else single
            if shape not in (single, whole):
                fix = f"the config asks for {list(single)}; give config and weights of the same training"
                raise MedusaError.of(f"{weights.files[source]}: {source}", list(shape), fix)
    # Others' folders may hold more, their target's tensors say; in ours, one too many is one that would not be used.
    extra = sorted(set(weights.shapes) - set(plan)) if opened.origin == FORMAT else []
    if extra:
        fix = "the config does not speak of it; give config and weights of the same training"
        raise MedusaError.of(f"{weights.files[extra[0]]}: tensor", extra[0], fix)
