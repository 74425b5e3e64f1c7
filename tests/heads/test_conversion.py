"""Conversion there and back is bit-exact, whatever the heads; what a format cannot say is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_folders import HEADS, reference_heads, write_folder
from safetensors.torch import load_file, save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, read_config, save_calibration, save_heads
from vllm_medusa.heads.config import Calibration
from vllm_medusa.heads.conversion import convert
from vllm_medusa.heads.model import MedusaHeads

Make = Callable[..., MedusaHeads]
Target = tuple[torch.Tensor, torch.Tensor]
CALIBRATION = Calibration(temperatures=[1.0, 1.1, 1.2], rank_accuracy=[[0.5, 0.2, 0.1, 0.0, 0.0]] * 3, rows=7)


@pytest.fixture
def model(tmp_path: Path, target: Target) -> str:
    """The target's folder."""
    folder = tmp_path / "lab-model"
    folder.mkdir()
    save_file({"lm_head.weight": target[0], "model.embed_tokens.weight": target[1]}, folder / "model.safetensors")
    return str(folder)


def assert_same(first: MedusaHeads, second: MedusaHeads) -> None:
    assert first.config == second.config
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, tensor in first.state_dict().items():
        assert tensor.dtype == second.state_dict()[name].dtype and torch.equal(tensor, second.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"base_model": "lab/model", "calibration": CALIBRATION},
        {"base_model": "lab/model", "draft_vocab_size": 20, "num_layers": 1},
        {"base_model": "lab/model", "unembedding": "per_head", "bias": False},
        {"base_model": "lab/model", "unembedding": "shared", "draft_vocab_size": 20, "logit_scale": 0.5},
        {"base_model": "lab/model", "unembedding": "per_head", "num_heads": 1},
    ],
)
def test_ours_to_vllm_and_back(
    make_heads: Make, tmp_path: Path, model: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    heads = make_heads(**shape).to(dtype)
    save_heads(heads, tmp_path / "ours")
    there = convert(str(tmp_path / "ours"), tmp_path / "vllm", "vllm", model)
    assert there.origin == "vllm-medusa/1" and there.tensors == len(heads.state_dict())
    convert(str(tmp_path / "vllm"), tmp_path / "back", "ours")
    assert_same(heads, load_heads(tmp_path / "back"))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_fasterdecoding_to_ours_to_vllm_keeps_every_bit(tmp_path: Path, file: str, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in reference_heads(layers=2).state_dict().items()}
    write_folder(tmp_path / "faster", {"medusa_num_heads": 2}, state, file)
    (tmp_path / "faster" / "README.md").write_text("terms")
    found = convert(str(tmp_path / "faster"), tmp_path / "ours", "ours")
    assert (found.origin, found.config.num_heads, found.kept) == ("FasterDecoding", HEADS, ("README.md",))
    convert(str(tmp_path / "ours"), tmp_path / "vllm", "vllm")
    written = load_file(tmp_path / "vllm" / "model.safetensors")
    assert len(written) == len(state)
    for name, tensor in state.items():
        head, layer, rest = name.split(".", 2)
        renamed = f"blocks.{head}.layers.{layer}.{rest[7:]}" if "linear" in rest else f"lm_heads.{head}.weight"
        assert written[renamed].dtype == dtype and torch.equal(written[renamed], tensor)
    assert (tmp_path / "vllm" / "README.md").read_text() == "terms"


def test_vllms_config_says_what_vllm_needs(make_heads: Make, tmp_path: Path, model: str) -> None:
    save_heads(make_heads(draft_vocab_size=20), tmp_path / "ours")
    assert "whole vocabulary" in convert(str(tmp_path / "ours"), tmp_path / "vllm", "vllm", model).note
    raw = json.loads((tmp_path / "vllm" / "config.json").read_text())
    # vLLM takes any other key with "num" and "heads" (or "layers") in it for these counts.
    assert [key for key in raw if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert (raw["vocab_size"], raw["truncated_vocab_size"], raw["original_lm_head"]) == (50, 50, True)
    # vLLM 0.32 stops at a token map that it uses; where the sizes are equal it passes over it, and we read it back.
    written = load_file(tmp_path / "vllm" / "model.safetensors")
    assert written["lm_head.weight"].shape == (50, 16) and written["token_map"].shape == (20,)


def test_tgi_heads_learn_their_targets_size_and_name(tmp_path: Path, model: str) -> None:
    blocks = {name: tensor for name, tensor in reference_heads().state_dict().items() if "linear" in name}
    write_folder(
        tmp_path / "tgi", {"medusa_num_heads": 3, "medusa_num_layers": 1}, blocks, "medusa_lm_head.safetensors"
    )
    assert convert(str(tmp_path / "tgi"), tmp_path / "unsaid", "ours").config.vocab_size == 0
    assert read_config(tmp_path / "unsaid").vocab_size == 0
    config = convert(str(tmp_path / "tgi"), tmp_path / "ours", "ours", model).config
    assert (config.vocab_size, config.base_model) == (50, "lab-model")


def test_calibration_of_a_foreign_folder_is_kept_beside_what_it_said(tmp_path: Path) -> None:
    said = {"medusa_num_heads": 2, "version": "2"}
    folder = write_folder(tmp_path / "faster", said, reference_heads().state_dict(), "medusa_lm_head.pt")
    before = (folder / "medusa_lm_head.pt").read_bytes()
    config = read_config(folder).model_copy(update={"top_k": 5})
    save_calibration(folder, CALIBRATION, config)
    raw = json.loads((folder / "config.json").read_text())
    assert {key: raw[key] for key in said} == said
    assert read_config(folder).calibration == CALIBRATION and load_heads(folder).config.num_heads == HEADS
    assert (folder / "medusa_lm_head.pt").read_bytes() == before
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "medusa_lm_head.pt"]


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"root_conditioned": True}, "root_conditioned"),
        ({"unembedding": "per_head", "draft_vocab_size": 20}, "draft_vocab_size=20"),
        ({}, "model=None"),
    ],
)
def test_what_vllm_cannot_say_is_refused_and_leaves_nothing(
    make_heads: Make, tmp_path: Path, shape: dict[str, Any], named: str
) -> None:
    save_heads(make_heads(**shape), tmp_path / "ours")
    with pytest.raises(MedusaError, match=named):
        convert(str(tmp_path / "ours"), tmp_path / "vllm", "vllm")
    assert [entry.name for entry in tmp_path.iterdir()] == ["ours"]


def test_a_folder_with_something_in_it_is_not_overwritten(make_heads: Make, tmp_path: Path) -> None:
    save_heads(make_heads(), tmp_path)
    with pytest.raises(MedusaError, match="dst="):
        convert(str(tmp_path), tmp_path, "ours")
    with pytest.raises(MedusaError, match="to='theirs'"):
        convert(str(tmp_path), tmp_path / "new", "theirs")


def test_heads_for_another_model_are_refused(make_heads: Make, tmp_path: Path, model: str) -> None:
    save_heads(make_heads(hidden_size=8), tmp_path / "ours")
    with pytest.raises(MedusaError, match="hidden_size"):
        convert(str(tmp_path / "ours"), tmp_path / "new", "ours", model)
