"""Engines shared by the host tests: a tiny random Llama and SmolLM2, plain and with trees, side by side in-process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_LEN, SPEAKING, VOCAB, Engine, Oracle, start
from tiny_llama import save_llama, save_random_heads

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
PROCESSORS = ["processors:NoRepeat", "processors:Alternate"]
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


# These engines' log-probabilities are compared within 1e-4. Our product sums in another order than vLLM's, which alone
# moved some by 1.2e-4. Tokens stay the same with it: MEDUSA_TEST_PRODUCT=medusa shows that, other engines always.
PRODUCT = os.environ.get("MEDUSA_TEST_PRODUCT", "vllm")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose greedy answers wander instead of repeating one token."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": VOCAB - 1, "bos_token_id": 1}
    save_llama(folder, seed=7, vocab_size=VOCAB, max_position_embeddings=MAX_LEN, **ends, **sizes)
    return folder


@pytest.fixture(scope="session")
def capped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 2: scores have a soft cap, and every other layer sees 24 tokens back."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(5)
    config = Gemma2Config(
        vocab_size=VOCAB, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=24,
        attn_logit_softcapping=4.0, final_logit_softcapping=30.0, query_pre_attn_scalar=32, head_dim=32,
        hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.35, eos_token_id=VOCAB - 1, bos_token_id=1, dtype="float32",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-gemma")
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speaker_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama that has a tokenizer, with two thinking tokens: texts, stop strings, grammars, cheaply."""
    folder = tmp_path_factory.mktemp("tiny-speaker")
    tokenizer = _small_tokenizer()
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    save_llama(folder, seed=17, vocab_size=len(tokenizer), max_position_embeddings=MAX_LEN, **ends)
    return folder


def _small_tokenizer() -> Any:
    """Byte-level BPE of about a thousand tokens, made from a text that does not change."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    text = (Path(__file__).parents[2] / "LICENSE").read_text() + "red green blue and certainly not perhaps " * 9
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<think>", "</think>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def speaker_heads(tmp_path_factory: pytest.TempPathFactory, speaker_model: Path) -> Path:
    """Random heads of the speaker's sizes."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(speaker_model)
    return _random_heads(tmp_path_factory.mktemp("speaker-heads"), config.hidden_size, config.vocab_size)


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads of the tiny model's sizes: junk guesses, right shapes."""
    return _random_heads(tmp_path_factory.mktemp("tiny-heads"), 128, VOCAB)


def _random_heads(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    torch.manual_seed(11)
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    save_random_heads(folder, num_heads=4, num_layers=1, root_conditioned=True, **sizes)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Engine:
    """Plain vLLM on the tiny model."""
    return start(tiny_model, max_model_len=MAX_LEN, block_size=32)


@pytest.fixture(scope="session")
def tiny_medusa(tiny_model: Path, tiny_heads: Path) -> Engine:
    """Trees of up to 128 nodes on the tiny model; nothing adaptive, so that tests decide what is drafted."""
    return start(
        tiny_model,
        tiny_heads,
        max_model_len=MAX_LEN,
        block_size=32,
        medusa={"num_speculative_tokens": 128, "adaptive": False, "linear_product": PRODUCT},
    )


@pytest.fixture(scope="session")
def speaker(speaker_model: Path) -> Engine:
    """Plain vLLM on the model that has a tokenizer."""
    return start(speaker_model, **SPEAKING, logits_processors=PROCESSORS)


@pytest.fixture(scope="session")
def speaker_medusa(speaker_model: Path, speaker_heads: Path) -> Engine:
    """Trees of up to 32 nodes on it."""
    medusa = {"num_speculative_tokens": 32, "adaptive": False, "linear_product": PRODUCT}
    return start(speaker_model, speaker_heads, **SPEAKING, medusa=medusa, logits_processors=PROCESSORS)


@pytest.fixture
def drafting() -> Iterator[Callable[[Oracle], Oracle]]:
    """Let an oracle draft until the test ends."""
    used: list[Any] = []

    def use(oracle: Oracle) -> Oracle:
        oracle.engine.runner._draft = oracle
        used.append(oracle.engine.runner)
        return oracle

    yield use
    for runner in used:
        runner.__dict__.pop("_draft", None)


@pytest.fixture(scope="module")
def ask(tiny_model: Path, tiny_heads: Path) -> Iterator[Callable[..., Any]]:
    """Run a function, by name if of `device_runs`, on the tiny model in a child on Model Runner V2."""
    import device_runs
    from interpreter import interpreted

    with interpreted() as child:

        def run(
            asked: str | Callable[..., Any], *args: Any, pair: Any = (tiny_model, tiny_heads), **options: Any
        ) -> Any:
            call = getattr(device_runs, asked) if isinstance(asked, str) else asked
            return child.submit(call, *pair, *args, **options).result(timeout=300)

        yield run
