"""Tiny random targets of the kinds that people serve, and heads of their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import MAX_LEN, VOCAB
from tiny_llama import save_random_heads

SIZES: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "eos_token_id": VOCAB - 1,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8))


def _gpt_oss() -> Any:
    """Every other layer sees 24 tokens back; each head of each layer has a sink as large as a score may be."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    config = GptOssConfig(
        **SIZES, layer_types=kinds, sliding_window=24, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0, std=2.0)
    return model


MODELS = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe}


def save_target(kind: str, folder: Path) -> tuple[Path, Path]:
    """Save a model of a `kind` of MODELS, and random heads; returns both folders."""
    torch.manual_seed(7)
    model = folder / kind
    MODELS[kind]().save_pretrained(model)
    torch.manual_seed(11)
    heads = folder / f"{kind}-heads"
    shape = {"hidden_size": SIZES["hidden_size"], "vocab_size": VOCAB}
    save_random_heads(heads, num_heads=4, num_layers=1, root_conditioned=True, **shape)
    return model, heads


@contextmanager
def inspected_here(*architectures: str) -> Iterator[None]:
    """The host looks at each kind of model in a process of its own, for ten seconds; here it stays in this one."""
    from vllm import ModelRegistry

    before = dict(ModelRegistry.models)
    for name in architectures:
        ModelRegistry.register_model(name, before[name].load_model_cls())
    try:
        yield
    finally:
        ModelRegistry.models.clear()
        ModelRegistry.models.update(before)
