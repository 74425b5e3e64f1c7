"""Our heads in the Medusa format of vLLM up to 0.32, for engines that read nothing else.

    blocks.{k}.layers.{j}.weight / .bias    one residual block
    lm_heads.{k}.weight                     one unembedding per head
    lm_head.weight                          one for all, with config `original_lm_head`
    token_map                               draft vocabulary, with config `truncated_vocab_size` < `vocab_size`

Our own config stands under one more key, which vLLM passes over: what its format cannot say (calibration, that the
unembedding is the target's) is there again when the folder is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.foreign import EMBEDDED


def check_sayable(config: HeadsConfig) -> None:
    """Whether vLLM's format can say what these heads are.

    Raises:
        MedusaError: root-conditioned heads, or a reduced vocabulary with one unembedding per head: vLLM has neither.
    """
    if config.root_conditioned:
        fix = "vLLM's own Medusa has plain heads only; train plain heads, or serve these with vllm-medusa"
        raise MedusaError.of("root_conditioned", True, fix)
    if config.unembedding == "per_head" and config.draft_vocab_size is not None:
        fix = "vLLM cannot load a reduced vocabulary with one unembedding per head; serve these heads with vllm-medusa"
        raise MedusaError.of("draft_vocab_size", config.draft_vocab_size, fix)


def to_vllm(
    config: HeadsConfig, tensors: Mapping[str, Tensor], unembedding: Tensor, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """vLLM's config.json and tensors for heads that `check_sayable` lets through.

    Args:
        config, tensors: the heads and their state, by our names.
        unembedding: [1 or K, Vd, H].
        vocab_size: the target's; vLLM throws the reduced vocabulary away where its config says another.
    """
    shared = config.unembedding != "per_head"
    raw: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": unembedding.shape[1],
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": shared,
        "logit_scale": config.logit_scale,
        "topk": config.top_k,
        "torch_dtype": str(unembedding.dtype).removeprefix("torch."),
    }
    raw[EMBEDDED] = config.model_dump(mode="json", exclude_none=True)
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
