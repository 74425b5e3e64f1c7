"""The Medusa format of vLLM up to 0.32, both ways: its config, its names, and how they map to our stacked ones.

    blocks.{k}.layers.{j}.weight / .bias    one residual block      (the older "{k}.{j}.linear.weight" is read too)
    lm_heads.{k}.weight                     one unembedding per head (the older "{k}.{n}.weight" is read too)
    lm_head.weight                          one for all, with config `original_lm_head`
    token_map                               draft vocabulary, with config `truncated_vocab_size` < `vocab_size`

A plan says which of a checkpoint's tensors make up each of ours: {"layers.0.weight": ["blocks.0.layers.0.weight", …]}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig

Plan = dict[str, list[str]]
_OLD_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OLD_UNEMBEDDING = re.compile(r"(\d+)\.(\d+)\.weight")


def config_from_vllm(raw: Mapping[str, Any], names: set[str], where: str) -> HeadsConfig:
    """Our config from vLLM's.

    Args:
        raw: vLLM's config.json; as vLLM does, any key with "num" and "heads" (or "layers") in it gives the count.
        names: tensors of the checkpoint, as they are spelt there.
        where: the config file, for messages.

    Raises:
        MedusaError: a missing count or size, by name.
    """
    aliases = {_modern(name) for name in names}
    vocab = _whole(raw, "vocab_size", where)
    reduced = raw.get("truncated_vocab_size")
    reduced = None if reduced in (None, vocab) else reduced
    values = {
        "num_heads": _whole(raw, _count_key(raw, "heads"), where),
        "num_layers": _whole(raw, _count_key(raw, "layers"), where),
        "hidden_size": _whole(raw, "hidden_size", where),
        "vocab_size": vocab,
        "bias": any(name.startswith("blocks.") and name.endswith(".bias") for name in aliases),
        "unembedding": "shared" if raw.get("original_lm_head", False) else "per_head",
        "draft_vocab_size": reduced,
        "logit_scale": raw.get("logit_scale", 1.0),
        "base_model": raw.get("base_model_name_or_path"),
    }
    size = reduced if isinstance(reduced, int) else vocab
    values["top_k"] = min(raw["topk"] if isinstance(raw.get("topk"), int) else 10, size)
    return HeadsConfig.parse(values, where)


def plan_from_vllm(config: HeadsConfig, names: set[str]) -> Plan:
    """Which of the checkpoint's tensors make up each of ours, by the checkpoint's own names."""
    spelt = {_modern(name): name for name in names}
    heads = range(config.num_heads)

    def found(*choices: str) -> str:
        return next((spelt[name] for name in choices if name in spelt), choices[0])

    plan = {}
    for layer in range(config.num_layers):
        for part in ("weight", "bias") if config.bias else ("weight",):
            plan[f"layers.{layer}.{part}"] = [found(f"blocks.{head}.layers.{layer}.{part}") for head in heads]
    if config.unembedding == "shared":
        plan["unembedding"] = [found("lm_head.weight", "lm_heads.0.weight")]
    else:
        plan["unembedding"] = [found(f"lm_heads.{head}.weight") for head in heads]
    if config.draft_vocab_size is not None:
        plan["token_map"] = [found("token_map")]
    return plan


def to_vllm(
    config: HeadsConfig, tensors: Mapping[str, Tensor], unembedding: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """vLLM's config.json and tensors for plain heads.

    Args:
        config, tensors: the heads and their state, by our names.
        unembedding: [1 or K, Vd, H].

    Raises:
        MedusaError: root-conditioned heads, which vLLM cannot express.
    """
    if config.root_conditioned:
        fix = "vLLM's own Medusa has plain heads only; train plain heads, or serve these with vllm-medusa"
        raise MedusaError.of("root_conditioned", True, fix)
    shared = unembedding.shape[0] == 1
    raw = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.num_outputs,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": shared,
        "logit_scale": config.logit_scale,
        "topk": config.top_k,
        "torch_dtype": str(unembedding.dtype).removeprefix("torch."),
    }
    if config.base_model is not None:
        raw["base_model_name_or_path"] = config.base_model
    out: dict[str, Tensor] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            for part in ("weight", "bias") if config.bias else ("weight",):
                name = f"blocks.{head}.layers.{layer}.{part}"
                out[name] = tensors[f"layers.{layer}.{part}"][head].contiguous()
        if not shared:
            out[f"lm_heads.{head}.weight"] = unembedding[head].contiguous()
    if shared:
        out["lm_head.weight"] = unembedding[0].contiguous()
    if config.draft_vocab_size is not None:
        out["token_map"] = tensors["token_map"].contiguous()
    return raw, out


def _modern(name: str) -> str:
    """A tensor's name as vLLM 0.32 spells it."""
    name = name.replace("medusa_heads.", "")
    if match := _OLD_BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _OLD_UNEMBEDDING.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _count_key(raw: Mapping[str, Any], what: str) -> str:
    usual = {"heads": "num_heads", "layers": "num_hidden_layers"}[what]
    return usual if usual in raw else next((key for key in raw if "num" in key and what in key), usual)


def _whole(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise MedusaError.of(f"{where}: {key}", value, "give a whole number, the one the heads were trained with")
    return value
