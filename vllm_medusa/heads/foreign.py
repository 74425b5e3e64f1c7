"""Heads that others trained: our config from theirs and from the weights, and which tensors make up each of ours.

Their configs are often wrong or incomplete, their weights are not: shapes decide where both could. Only vLLM's own
format is taken at its word, because there a smaller number of heads is a choice.

A plan says which of a checkpoint's tensors make up each of ours: {"layers.0.weight": ["blocks.0.layers.0.weight", …]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig, is_padding
from vllm_medusa.heads.layouts import Layout, find_layout
from vllm_medusa.heads.storage import Shape

Plan = dict[str, list[str]]
# Under this key of others' config.json stands our whole config, where we know more than theirs can say (calibration).
EMBEDDED = "vllm_medusa"
# Kinds that guess one token after the other: IBM's accelerators, which vLLM served up to 0.32.
_SEQUENTIAL = ("mlp_speculator",)
_SAME_TRAINING = "give config and weights of the same training"


def read_foreign(raw: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> tuple[HeadsConfig, Plan, Layout]:
    """Our config, and where each of our tensors comes from, for a checkpoint that is not in our format.

    Args:
        raw: its config.json.
        shapes: its tensors.
        where: the config file, for messages.

    Raises:
        MedusaError: what is missing or contradicts itself, by key, value and fix.
    """
    if raw.get("model_type") in _SEQUENTIAL:
        fix = (
            "its heads read the token that the head before them guessed, so they would be asked anew for every node "
            "of a tree, which is not done here; train heads of this target: vllm-medusa train --model MODEL"
        )
        raise MedusaError.of(f"{where}: model_type", raw["model_type"], fix)
    layout = find_layout(shapes, raw, where)
    embedded = raw.get(EMBEDDED)
    if embedded is not None and not isinstance(embedded, dict):
        raise MedusaError.of(
            f"{where}: {EMBEDDED}", embedded, "must hold our config, an object; convert the heads again"
        )
    if embedded is not None:
        config = HeadsConfig.parse(embedded, f"{where}: {EMBEDDED}")
    else:
        config = _config(raw, layout, shapes, where)
    return config, _plan(config, layout), layout


def _config(raw: Mapping[str, Any], layout: Layout, shapes: Mapping[str, Shape], where: str) -> HeadsConfig:
    num_heads, num_layers = _counts(raw, layout, where)
    unembedding = _unembedding(raw, layout)
    rows = _rows(layout, shapes, unembedding)
    vocab, reduced = _vocabulary(raw, layout, shapes, rows, where)
    hidden = raw.get("hidden_size")
    if hidden is None:
        known = layout.source("blocks.0.layers.0.weight", "lm_heads.0.weight", "lm_head.weight")
        hidden = shapes[known][-1] if shapes.get(known) else None
    values: dict[str, Any] = {
        "num_heads": num_heads,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "bias": _bias(raw, layout),
        "unembedding": unembedding,
        "draft_vocab_size": reduced,
        "logit_scale": raw.get("logit_scale", 1.0),
        "base_model": raw.get("base_model_name_or_path") or raw.get("_name_or_path") or None,
    }
    top_k = raw["topk"] if isinstance(raw.get("topk"), int) else 10
    values["top_k"] = min(top_k, reduced or vocab or top_k)
    return HeadsConfig.parse(values, where)


def _plan(config: HeadsConfig, layout: Layout) -> Plan:
    heads = range(config.num_heads)
    plan: Plan = {}
    for layer in range(config.num_layers):
        # One block repeated, stored once: FasterDecoding builds heads of several layers from a single module.
        stored = min(layer, max(layout.stored_layers - 1, 0)) if layout.origin != "vLLM" else layer
        for part in ("weight", "bias") if config.bias else ("weight",):
            plan[f"layers.{layer}.{part}"] = [layout.source(f"blocks.{head}.layers.{stored}.{part}") for head in heads]
    if config.unembedding == "shared":
        plan["unembedding"] = [layout.source("lm_head.weight", "lm_heads.0.weight")]
    elif config.unembedding == "per_head":
        plan["unembedding"] = [layout.source(f"lm_heads.{head}.weight") for head in heads]
    if config.draft_vocab_size is not None:
        plan["token_map"] = [layout.source("token_map")]
    return plan


def _counts(raw: Mapping[str, Any], layout: Layout, where: str) -> tuple[int, int]:
    """Heads, and residual blocks per head."""
    if layout.origin == "vLLM":
        heads, layers = _stated(raw, "heads", where), _stated(raw, "layers", where)
        return heads or layout.num_heads, layout.stored_layers if layers is None else layers
    if layout.num_layers is not None:
        layers = layout.num_layers
    else:
        medusa = raw.get("medusa")
        claims = (medusa if isinstance(medusa, Mapping) else {}).get("num_medusa_layers")
        claims = raw.get("medusa_num_layers", raw.get("num_medusa_layers", claims))
        layers = claims if isinstance(claims, int) and not isinstance(claims, bool) else layout.stored_layers
    if layers < layout.stored_layers or (layers > layout.stored_layers > 1):
        fix = f"the weights hold {layout.stored_layers} blocks per head; {_SAME_TRAINING}"
        raise MedusaError.of(f"{where}: layers", layers, fix)
    return layout.num_heads, layers


def _stated(raw: Mapping[str, Any], what: str, where: str) -> int | None:
    """The count that vLLM would take: any key with "num" and "heads" (or "layers") in it. None: not said."""
    usual = {"heads": "num_heads", "layers": "num_hidden_layers"}[what]
    key = usual if usual in raw else next((key for key in raw if "num" in key and what in key), usual)
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise MedusaError.of(f"{where}: {key}", value, "give a whole number, the one the heads were trained with")
    return value


def _unembedding(raw: Mapping[str, Any], layout: Layout) -> str:
    if raw.get("original_lm_head", False):
        return "shared"
    if layout.origin == "vLLM":
        alone = layout.has("lm_head.weight") and not layout.has("lm_heads.0.weight")
        return "shared" if alone else "per_head"
    # An lm_head.weight beside such heads is the target's: they were saved inside it.
    return "per_head" if any(name.startswith("lm_heads.") for name in layout.spelt) else "target"


def _rows(layout: Layout, shapes: Mapping[str, Shape], unembedding: str) -> int | None:
    if unembedding == "target":
        return None
    first = ("lm_head.weight", "lm_heads.0.weight") if unembedding == "shared" else ("lm_heads.0.weight",)
    shape = shapes.get(layout.source(*first))
    return shape[0] if shape else None


def _vocabulary(
    raw: Mapping[str, Any], layout: Layout, shapes: Mapping[str, Shape], rows: int | None, where: str
) -> tuple[int, int | None]:
    """V, 0 where only the target knows it, and Vd, None without a reduced vocabulary."""
    said = {key: raw.get(key) for key in ("vocab_size", "truncated_vocab_size")}
    for key, value in said.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise MedusaError.of(f"{where}: {key}", value, "give a whole number, the one the heads were trained with")
    vocab, reduced = said["vocab_size"], said["truncated_vocab_size"]
    token_map = shapes.get(layout.spelt.get("token_map", ""))
    if reduced is None and token_map and token_map[0] == rows and rows != vocab:
        reduced = rows
    if reduced == (rows if vocab is None and token_map is None else vocab):
        reduced = None
    if reduced is not None:
        whole = vocab or (rows if rows is not None and rows > reduced else None)
        if whole is None:
            raise MedusaError.of(f"{where}: vocab_size", None, "give the target's, which token_map points into")
        return whole, reduced
    if rows is None:
        return vocab or 0, None
    if vocab is not None and not is_padding(rows, vocab):
        raise MedusaError.of(f"{where}: vocab_size", vocab, f"the unembedding has {rows} rows; {_SAME_TRAINING}")
    return rows, None


def _bias(raw: Mapping[str, Any], layout: Layout) -> bool:
    """Whether blocks have biases: what vLLM's config says, else whether there are any."""
    said = raw.get("medusa_fc_bias") if layout.origin == "vLLM" else None
    return said if isinstance(said, bool) else any(name.endswith(".bias") for name in layout.spelt)
