"""A tiny random Llama, and heads that know what it will say: what the self-check serves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads

HIDDEN, VOCAB, HEADS = 128, 160, 4
MAX_LEN, ANSWER = 128, 24  # tokens
PROMPTS = tuple(tuple(range(5 + 31 * number, 5 + 31 * number + 7 + 3 * number)) for number in range(4))


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write both below `folder`, the model in float32; returns their folders.

    The heads are planted: their unembeddings are solved so that on the rows of the model's own answers they guess
    right, but for rounding. So drafted trees are accepted, though nothing was trained.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=VOCAB - 1,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(folder / "model")
    save_heads(_planted(model), folder / "heads")
    return folder / "model", folder / "heads"


def _planted(model: torch.nn.Module) -> MedusaHeads:
    config = HeadsConfig(
        num_heads=HEADS, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, unembedding="per_head", top_k=8
    )
    heads = MedusaHeads(config)  # blocks of zeros: the model's row as it is
    assert heads.unembedding is not None
    pairs = [_answer(model, prompt) for prompt in PROMPTS]
    for head in range(HEADS):
        # The row at place i leads to the root at i + 1; head k guesses the token k + 1 places behind that.
        ahead = head + 2
        rows = torch.cat([rows[:-ahead] for _, rows in pairs])
        wanted = torch.cat([tokens[ahead:] for tokens, _ in pairs])
        target = 10.0 * torch.nn.functional.one_hot(wanted, VOCAB).float()
        heads.unembedding.data[head] = torch.linalg.lstsq(rows, target, driver="gelsd").solution.T
    return heads


def _answer(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The last token of the prompt with the model's greedy answer, int64 [n], and their final rows, [n, H]."""
    tokens = list(prompt)
    for _ in range(ANSWER + HEADS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    rows: Tensor = model.model(torch.tensor([tokens])).last_hidden_state[0]  # type: ignore[operator]
    first = len(prompt) - 1
    return torch.tensor(tokens[first:]), rows[first:]
