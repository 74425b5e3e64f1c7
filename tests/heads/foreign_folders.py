"""Folders as other people's trainers write them, from modules built like theirs; nothing here is read by our code."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

HIDDEN, VOCAB, HEADS = 16, 50, 3


class Residual(nn.Module):
    """x + SiLU(linear(x))."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def reference_heads(layers: int = 1, vocab: int = VOCAB, seed: int = 0) -> nn.ModuleList:
    """Heads as the reference builds them: one residual module, repeated `layers` times, and an unembedding."""
    torch.manual_seed(seed)
    heads = (nn.Sequential(*([Residual()] * layers), nn.Linear(HIDDEN, vocab, bias=False)) for _ in range(HEADS))
    return nn.ModuleList(heads).requires_grad_(False)


def reference_logits(heads: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    """[B, K, V] from hidden rows [B, H]."""
    return torch.stack([head(hidden) for head in heads], dim=1)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str) -> Path:
    """A folder with config.json and one file of weights, whose ending says how they are stored."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def base_config() -> dict[str, Any]:
    """The config.json of a target, as exports of whole models carry it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModel": "remote.Code"},
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_attention_heads": 2,
        "num_hidden_layers": 7,
    }


def base_tensors() -> dict[str, torch.Tensor]:
    """A few tensors of a target, which are none of the heads' business."""
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(HIDDEN, HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN),
    }
