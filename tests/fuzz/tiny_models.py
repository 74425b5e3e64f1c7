"""The tiny models that the fuzzer serves, and heads of their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from schedules import EOS, VOCAB

MODELS = ("llama", "gemma", "speaker")
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
            "speaker", a llama with a tokenizer, for grammars.
        folder: where both get a folder.
    """
    torch.manual_seed(7)
    model, heads = folder / name, folder / f"{name}-heads"
    sizes = dict(SIZES)
    if name == "speaker":
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(model)
        sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (_gemma(sizes) if name == "gemma" else _llama(sizes)).save_pretrained(model)
    _save_heads(heads, sizes["vocab_size"])
    return model, heads


def _tokenizer() -> Any:
    """Byte-level BPE of a few hundred tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["red green blue and red and blue, 12 345 6789 {} "] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _llama(sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))


def _gemma(sizes: dict[str, Any]) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, sliding_window=24, query_pre_attn_scalar=32, **sizes
    )
    return Gemma3ForCausalLM(config)


def _save_heads(folder: Path, vocab_size: int) -> None:
    from vllm_medusa.heads.checkpoint import save_heads
    from vllm_medusa.heads.config import HeadsConfig
    from vllm_medusa.heads.model import MedusaHeads

    config = HeadsConfig(
        num_heads=4, num_layers=1, hidden_size=SIZES["hidden_size"], vocab_size=vocab_size, root_conditioned=True
    )
    heads = MedusaHeads(config)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    folder.mkdir(parents=True, exist_ok=True)
    save_heads(heads, folder)
