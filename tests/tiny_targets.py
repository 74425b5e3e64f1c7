"""Tiny random targets of the kinds that people serve, and heads of their sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_llama import make_llama, save_random_heads

VOCAB, MAX_LEN = 160, 512
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


def _mixtral(sizes: dict[str, Any]) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**{"num_local_experts": 4, "num_experts_per_tok": 2, **sizes}))


def _qwen3_moe(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**EXPERTS, "num_experts": 8, **sizes}))


def _gpt_oss(sizes: dict[str, Any]) -> Any:
    """Every other layer sees 24 tokens back; each head of each layer has a sink as large as a score may be."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    config = GptOssConfig(
        **{"num_local_experts": 4, "num_experts_per_tok": 2, **sizes}, layer_types=kinds, sliding_window=24,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": sizes["max_position_embeddings"] // 2,
        },
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0, std=2.0)
    return model


def _llama(sizes: dict[str, Any]) -> Any:
    return make_llama(seed=7, **sizes)


def _granite(sizes: dict[str, Any]) -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=8.0, embedding_multiplier=3.0))


def _cohere(sizes: dict[str, Any]) -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**{**sizes, "tie_word_embeddings": True}))


def _gemma2(sizes: dict[str, Any]) -> Any:
    """Logits that its bound bends."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**{**sizes, "tie_word_embeddings": True}, final_logit_softcapping=6.0)
    return Gemma2ForCausalLM(config)


def _gpt_neox(sizes: dict[str, Any]) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    left_out = ("head_dim", "num_key_value_heads")
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{key: value for key, value in sizes.items() if key not in left_out}))


def _gptj(sizes: dict[str, Any]) -> Any:
    """With a bias behind its unembedding."""
    from transformers import GPTJConfig, GPTJForCausalLM

    model = GPTJForCausalLM(
        GPTJConfig(
            n_embd=sizes["hidden_size"], n_head=4, n_layer=2, n_positions=MAX_LEN, rotary_dim=8, n_inner=96,
            **{key: sizes[key] for key in ("vocab_size", "initializer_range", "tie_word_embeddings", "eos_token_id")},
        )
    )  # fmt: skip
    torch.nn.init.normal_(model.lm_head.bias, std=2.0)
    return model


MODELS = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "cohere": _cohere,
    "gemma2": _gemma2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
}


def save_model(kind: str, folder: Path, **sizes: Any) -> None:
    """Save a model of a `kind` of MODELS; `sizes` over those above."""
    torch.manual_seed(7)
    MODELS[kind]({**SIZES, **sizes}).save_pretrained(folder)


def save_target(kind: str, folder: Path) -> tuple[Path, Path]:
    """Save a model of a `kind` of MODELS, and random heads; returns both folders."""
    model = folder / kind
    save_model(kind, model)
    torch.manual_seed(11)
    heads = folder / f"{kind}-heads"
    shape = {"hidden_size": SIZES["hidden_size"], "vocab_size": VOCAB}
    save_random_heads(heads, num_heads=4, num_layers=1, root_conditioned=True, **shape)
    return model, heads


def add_cache_scales(model: Path) -> None:
    """Make a checkpoint ask for a float8 cache: a scale for each layer's keys and for its values, all different."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
        "quantization_status": "compressed", "kv_cache_scheme": scheme,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for part, scale in (("k", 0.0625), ("v", 0.05)):
            weights[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor([scale * (1 + layer)])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


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


def make_expert_group() -> None:
    """Make vLLM's group of experts in a process whose groups come from an engine that has none.

    vLLM makes its process groups once in a process, and this one only if the first engine's model has experts. Users
    have one engine in a process; the tests have many.
    """
    from vllm.distributed import parallel_state as groups

    if groups.model_parallel_is_initialized() and groups._EP is None:
        world = groups.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        groups._EP = groups.init_model_parallel_group([world.ranks], world.local_rank, backend, group_name="ep")
