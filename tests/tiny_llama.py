"""A random Llama of a few thousand weights, a small tokenizer, and heads that fit: for tests of any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def make_llama(*, seed: int, **sizes: Any) -> Any:
    """A Llama in float32 whose greedy answers wander instead of repeating one token.

    `sizes`: of transformers' `LlamaConfig`, over those below; `vocab_size` is needed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    given: dict[str, Any] = {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.35,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **sizes,
    }
    return LlamaForCausalLM(LlamaConfig(**given)).eval()


def save_llama(folder: Path, *, seed: int, **sizes: Any) -> None:
    """Save what `make_llama` makes."""
    make_llama(seed=seed, **sizes).save_pretrained(folder)


def small_tokenizer(text: str, size: int, *, special: tuple[str, ...] = (), named: dict[str, str] | None = None) -> Any:
    """Byte-level BPE of about `size` tokens that has learnt `text`, with <s>, </s> and the `special` ones.

    `named`: special ones by the attribute that a processor asks for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>", *special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    more = {"extra_special_tokens": named} if named else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **more)


def save_random_heads(folder: Path, *, std: float = 0.05, **sizes: Any) -> None:
    """Save heads of `sizes` (see `HeadsConfig`), every weight drawn."""
    from vllm_medusa.heads.checkpoint import save_heads
    from vllm_medusa.heads.config import HeadsConfig
    from vllm_medusa.heads.model import MedusaHeads

    heads = MedusaHeads(HeadsConfig(**sizes))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=std)
    folder.mkdir(parents=True, exist_ok=True)
    save_heads(heads, folder)
