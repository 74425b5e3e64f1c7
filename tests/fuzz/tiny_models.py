"""The tiny models that the fuzzer serves, and heads of their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from schedules import EOS, VOCAB
from tiny_llama import make_llama, save_random_heads, small_tokenizer
from tiny_targets import MODELS as KINDS

MODELS = ("llama", "gemma", "speaker")
# `make test-long` takes these too. All of their experts answer for each token: two that score the same but for rounding
# would be chosen in another order by another kernel, and nobody would be wrong.
MORE = ("mixtral", "gpt_oss", "qwen3_moe")
LOSE_WEIGHTS = ("mixtral", "qwen3_moe")  # plain vLLM 0.32 on a CPU says something else after `reload_weights`
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 2}
SIZES: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def save(name: str, folder: Path) -> tuple[Path, Path]:
    """Save a random model and random heads.

    Args:
        name: "llama"; "gemma", where every other layer sees 24 tokens back, so that there are two KV cache groups;
            "speaker", a llama with a tokenizer, for grammars; or one of MORE.
        folder: where both get a folder.
    """
    torch.manual_seed(7)
    model, heads = folder / name, folder / f"{name}-heads"
    sizes = dict(SIZES)
    if name == "speaker":
        tokenizer = small_tokenizer("red green blue and red and blue, 12 345 6789 {} ", 320)
        tokenizer.save_pretrained(model)
        sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if name in MORE:
        KINDS[name]({"num_hidden_layers": 2, "pad_token_id": 0, **sizes, **_EXPERTS}).save_pretrained(model)
    else:
        (_gemma(sizes) if name == "gemma" else make_llama(seed=7, **sizes)).save_pretrained(model)
    shape = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"]}
    shape["draft_vocab_size"] = shape["vocab_size"] - 9  # a copy of the target's rows, that has to follow it
    save_random_heads(heads, num_heads=4, num_layers=1, root_conditioned=True, **shape)
    return model, heads


def _gemma(sizes: dict[str, Any]) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, sliding_window=24, query_pre_attn_scalar=32, **sizes
    )
    return Gemma3ForCausalLM(config)
