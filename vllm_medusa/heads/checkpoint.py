"""Heads in and out of folders: ours (config.json and model.safetensors), and vLLM's own Medusa format up to 0.32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import FORMAT, HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.storage import Shape, Weights, open_weights
from vllm_medusa.heads.vllm_format import Plan, config_from_vllm, plan_from_vllm, to_vllm

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_config(path: str | Path) -> HeadsConfig:
    """What the heads in folder `path` are, checked against the shapes (not the values) of their weights.

    Raises:
        MedusaError: a missing or damaged file, a missing tensor, a wrong shape, a config that cannot be.
    """
    return _open(Path(path))[0]


def load_heads(path: str | Path, *, draft_vocab: bool = True) -> MedusaHeads:
    """Heads from folder `path`, not bound to a target yet, in the dtype they were saved in.

    Args:
        path: a folder in our format or vLLM's.
        draft_vocab: False makes heads that share the target's unembedding guess in the whole vocabulary.

    Raises:
        MedusaError: what `read_config` refuses, NaN or infinite weights, a token map out of range, or
            `draft_vocab=False` for heads whose own unembedding is reduced.
    """
    config, plan, weights = _open(Path(path))
    state = {name: _read(weights, name, sources) for name, sources in plan.items()}
    token_map = state.get("token_map")
    if token_map is not None:
        state["token_map"] = token_map = _checked_map(token_map, config, weights.files[plan["token_map"][0]])
        if "unembedding" in state and state["unembedding"].shape[1] != config.draft_vocab_size:
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
        unembedding: [V, H], the target's lm_head, for heads that share it and are not bound.

    Raises:
        MedusaError: root-conditioned heads; heads that share an unembedding that is not given.
    """
    if unembedding is not None and heads.config.unembedding == "target":
        written = (unembedding if heads.token_map is None else unembedding[heads.token_map])[None]
    elif heads.unembedding is not None:
        written = heads.unembedding.data
    else:
        written = heads.unembedding_weight()
    raw, tensors = to_vllm(heads.config, heads.state_dict(), written)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, raw, tensors)
    return folder


def check_heads(config: HeadsConfig, hidden_size: int, vocab_size: int) -> None:
    """Whether heads fit a target of these sizes; the target's vocabulary may be padded beyond the heads'.

    Raises:
        MedusaError: they do not.
    """
    made_for = f" (made for {config.base_model})" if config.base_model else ""
    if config.hidden_size != hidden_size:
        fix = f"the target's rows have {hidden_size}; use heads trained for this target{made_for}"
        raise MedusaError.of("heads' hidden_size", config.hidden_size, fix)
    if config.vocab_size > vocab_size:
        fix = f"the target knows {vocab_size} tokens; use heads trained for this target{made_for}"
        raise MedusaError.of("heads' vocab_size", config.vocab_size, fix)


def _open(folder: Path) -> tuple[HeadsConfig, Plan, Weights]:
    """Config, the sources of each of our tensors, and the weights; names and shapes are checked."""
    if not folder.is_dir():
        raise MedusaError.of(
            "heads", str(folder), "no such folder; name the folder that holds config.json and the weights"
        )
    raw = _read_json(folder / CONFIG)
    weights = open_weights(folder)
    where = str(folder / CONFIG)
    names = set(weights.shapes)
    if "format" in raw:
        if raw["format"] != FORMAT:
            raise MedusaError.of(
                f"{where}: format", raw["format"], f"this version reads {FORMAT!r}; update vllm-medusa"
            )
        config = HeadsConfig.parse(raw, where)
        plan: Plan = {name: [name] for name in _shapes(config)}
    else:
        config = config_from_vllm(raw, names, where)
        plan = plan_from_vllm(config, names)
    _check_shapes(config, plan, weights, folder)
    return config, plan, weights


def _shapes(config: HeadsConfig) -> dict[str, Shape]:
    """Shape of each of our tensors."""
    with torch.device("meta"):
        heads = MedusaHeads(config)
    return {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}


def _check_shapes(config: HeadsConfig, plan: Plan, weights: Weights, folder: Path) -> None:
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


def _read(weights: Weights, name: str, sources: list[str]) -> Tensor:
    if sources == [name] or name == "token_map":
        return weights.read(sources[0])
    return torch.stack([weights.read(source) for source in sources])


def _checked_map(token_map: Tensor, config: HeadsConfig, file: Path) -> Tensor:
    """int64 [Vd], distinct token ids below V."""
    if token_map.is_floating_point() or token_map.ndim != 1:
        raise MedusaError.of(
            f"{file}: token_map", str(token_map.dtype), "must hold token ids, whole numbers in one row"
        )
    ids = token_map.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise MedusaError.of(
            f"{file}: token_map", int(ids.max()), f"token ids lie between 0 and {config.vocab_size - 1}"
        )
    if len(set(ids.tolist())) != ids.numel():
        raise MedusaError.of(f"{file}: token_map", ids.numel(), "the same token appears twice; each may stand once")
    return ids


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MedusaError.of("heads", str(file.parent), f"holds no {CONFIG}; name a folder of heads") from None
    except (OSError, ValueError) as error:
        fix = f"is not valid JSON ({error}); download or train the heads again"
        raise MedusaError.of(f"heads in {file.parent}", file.name, fix) from None
    if not isinstance(raw, dict):
        raise MedusaError.of(f"heads in {file.parent}", file.name, "must hold one JSON object")
    return raw


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    # Weights first, under another name: a killed writer leaves no folder that half reads.
    partial = folder / f"{WEIGHTS}.partial"
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
