"""Good folders of heads, small ones, that cases spoil; and what a folder holds, to see that nobody wrote."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_medusa.heads.checkpoint import save_heads, save_vllm
from vllm_medusa.heads.config import Calibration, HeadsConfig
from vllm_medusa.heads.model import MedusaHeads

HIDDEN, VOCAB, HEADS = 16, 50, 3
WEIGHTS = "model.safetensors"


def make_ours(folder: Path) -> Path:
    """Root-conditioned and calibrated heads with a reduced vocabulary, in our format."""
    accuracy = [[0.4, 0.1, 0.05, 0.03, 0.02]] * HEADS
    errors = [0.02] * HEADS
    calibration = Calibration(temperatures=[1.0] * HEADS, rank_accuracy=accuracy, ece_before=errors, ece_after=errors)
    config = HeadsConfig(
        num_heads=HEADS, num_layers=2, hidden_size=HIDDEN, vocab_size=VOCAB, root_conditioned=True, draft_vocab_size=20,
        top_k=5, calibration=calibration, base_model="lab/model", training={"data": {"prompts": 9}},
    )  # fmt: skip
    return save_heads(_filled(config), folder)


def make_vllm(folder: Path) -> Path:
    """Plain heads in vLLM's format, an unembedding for each."""
    config = HeadsConfig(
        num_heads=HEADS, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, top_k=5, unembedding="per_head"
    )
    save_vllm(_filled(config), folder)
    edit_config(folder, vllm_medusa=None)
    return folder


def faster_tensors() -> dict[str, torch.Tensor]:
    """The tensors of plain heads as FasterDecoding names them."""
    torch.manual_seed(2)
    tensors = {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN)
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, HIDDEN)
    return tensors


def make_faster(folder: Path) -> Path:
    """The same in a pickle, with the little that its config says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": 1}))
    torch.save(faster_tensors(), folder / "medusa_lm_head.pt")
    return folder


def make_tgi(folder: Path) -> Path:
    """Heads that share the target's unembedding: blocks alone, and how many there are says the config."""
    make_faster(folder)
    blocks = {name: tensor for name, tensor in faster_tensors().items() if ".linear." in name}
    torch.save(blocks, folder / "medusa_lm_head.pt")
    return folder


def make_target(folder: Path) -> Path:
    """What calibrating and converting read of a target: its two matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({name: torch.randn(VOCAB, HIDDEN) for name in names}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of the folder's config.json; None removes a key."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Change tensors of model.safetensors, their dots spelt __: a new value, a function of the old, or None."""
    tensors = load_file(folder / WEIGHTS)
    for spelt, change in changes.items():
        name = spelt.replace("__", ".")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name]).contiguous() if callable(change) else change
    save_file(tensors, folder / WEIGHTS)


def listing(place: Path) -> dict[str, tuple[Any, ...]]:
    """Every name under `place` with its kind, size, time of change and content."""
    found: dict[str, tuple[Any, ...]] = {}
    for root, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(root, name)
            facts = path.lstat()
            small = path.is_file() and not path.is_symlink() and facts.st_size < 2**20
            content = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
            found[str(path.relative_to(place))] = (facts.st_mode, facts.st_size, facts.st_mtime_ns, content)
    return found


def _filled(config: HeadsConfig) -> MedusaHeads:
    heads = MedusaHeads(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in heads.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return heads.requires_grad_(False)
