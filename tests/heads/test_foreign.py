"""Heads that others trained, read as they are: the same logits as modules built like theirs, bit by bit where exact."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_folders import (
    HEADS,
    HIDDEN,
    VOCAB,
    base_config,
    base_tensors,
    reference_heads,
    reference_logits,
    write_folder,
)
from safetensors.torch import load_file, save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, read_config, save_heads
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.opening import open_folder

Target = tuple[torch.Tensor, torch.Tensor]
FASTER = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lab/model"}  # 3 heads in truth


def assert_same_logits(folder: Path, reference: torch.nn.ModuleList, target: Target) -> None:
    heads = load_heads(folder).float()
    heads.bind(*target)
    hidden = torch.randn(5, HIDDEN)
    # Products of stacked and of single matrices sum in another order.
    torch.testing.assert_close(heads(hidden, None), reference_logits(reference, hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_fasterdecoding_with_a_config_that_says_little_and_wrong(file: str, tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    write_folder(tmp_path, FASTER, reference.state_dict(), file)
    config = read_config(tmp_path)
    assert (config.num_heads, config.num_layers, config.vocab_size) == (HEADS, 1, VOCAB)
    assert (config.unembedding, config.bias, config.base_model) == ("per_head", True, "lab/model")
    assert open_folder(tmp_path).origin == "FasterDecoding"
    assert_same_logits(tmp_path, reference, target)


@pytest.mark.parametrize("config", [{}, {"medusa_num_layers": 3, "medusa_num_heads": 9}], ids=["empty", "full"])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_several_layers_that_are_one_module(file: str, config: Any, tmp_path: Path, target: Target) -> None:
    reference = reference_heads(layers=3)
    write_folder(tmp_path, config, reference.state_dict(), file)
    assert read_config(tmp_path).num_layers == 3
    assert_same_logits(tmp_path, reference, target)


def test_several_layers_that_are_one_module_stored_once(tmp_path: Path, target: Target) -> None:
    reference = reference_heads(layers=3)
    once = {name: x for name, x in reference.state_dict().items() if ".1.linear." not in name and ".2." not in name}
    write_folder(tmp_path, FASTER, once, "medusa_lm_head.safetensors")
    assert read_config(tmp_path).num_layers == 3
    assert_same_logits(tmp_path, reference, target)


def test_heads_inside_their_target(tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    tensors = {f"medusa_head.{name}": tensor for name, tensor in reference.state_dict().items()} | base_tensors()
    write_folder(tmp_path, base_config(), tensors, "model.safetensors")
    assert read_config(tmp_path).num_heads == HEADS
    assert_same_logits(tmp_path, reference, target)


def test_heads_beside_their_target_and_a_trainers_leavings(tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    write_folder(tmp_path, FASTER, reference.state_dict(), "medusa_lm_head.pt")
    save_file(base_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Path("code"), protocol=2))
    assert_same_logits(tmp_path, reference, target)


def test_tgi_heads_share_the_targets_unembedding_and_learn_its_size(tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    blocks = {name: x for name, x in reference.state_dict().items() if ".linear." in name}
    write_folder(tmp_path, FASTER | {"version": "2"}, blocks, "medusa_lm_head.safetensors")
    config = read_config(tmp_path)
    assert (config.unembedding, config.vocab_size, open_folder(tmp_path).origin) == ("target", 0, "TGI v2")
    heads = load_heads(tmp_path)
    heads.bind(*target)
    assert heads.config.vocab_size == VOCAB
    for head in reference:
        head[1].weight.data.copy_(target[0])
    assert_same_logits(tmp_path, reference, target)


MODELOPT = base_config() | {"medusa": {"num_medusa_heads": HEADS, "num_medusa_layers": 1}}


def test_model_optimizer_inside_its_target(tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in reference.state_dict().items()} | base_tensors()
    write_folder(tmp_path, MODELOPT, tensors, "model.safetensors")
    assert open_folder(tmp_path).origin == "TensorRT Model Optimizer"
    assert read_config(tmp_path).unembedding == "per_head"
    assert_same_logits(tmp_path, reference, target)


def test_model_optimizer_for_tensorrt_llm(tmp_path: Path, target: Target) -> None:
    reference = reference_heads()
    tensors = {}
    for name, tensor in reference.state_dict().items():
        head, layer, rest = name.split(".", 2)
        tail = f"medusa_layers.{layer}.{rest}" if "linear" in rest else f"lm_head.{rest}"
        tensors[f"medusa_heads.{head}.{tail}"] = tensor
    config = {"architecture": "MedusaForCausalLM", "num_medusa_heads": HEADS, "num_medusa_layers": 1}
    write_folder(tmp_path, config, tensors, "rank0.safetensors")
    assert open_folder(tmp_path).origin == "TensorRT Model Optimizer"
    assert_same_logits(tmp_path, reference, target)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "rank1.safetensors")
    with pytest.raises(MedusaError, match="one rank"):
        read_config(tmp_path)


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_values_are_scaled(tmp_path: Path, per_row: bool) -> None:
    tensors = {}
    wanted = {}
    for name, tensor in reference_heads().state_dict().items():
        name = f"medusa_heads.{name}"
        if name.endswith(".bias"):
            tensors[name] = tensor.bfloat16()
            continue
        scale = (tensor.abs().amax(1, keepdim=True) if per_row else tensor.abs().amax()) / 448.0
        tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
        wanted[name] = (tensors[name].float() * scale).bfloat16()
    write_folder(tmp_path, MODELOPT, tensors, "model.safetensors")
    heads = load_heads(tmp_path)
    for head in range(HEADS):
        assert torch.equal(heads.layers[0].weight[head], wanted[f"medusa_heads.{head}.0.linear.weight"])
        assert heads.unembedding is not None
        assert torch.equal(heads.unembedding[head], wanted[f"medusa_heads.{head}.1.weight"])
    del tensors["medusa_heads.1.0.linear.weight_scale"]
    write_folder(tmp_path, MODELOPT, tensors, "model.safetensors")
    with pytest.raises(MedusaError, match="need their scale"):
        load_heads(tmp_path)


def vllm_folder(folder: Path, config: dict[str, Any], drop: str = "", **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Plain heads in vLLM's own format; returns its tensors."""
    tensors = {}
    for name, tensor in reference_heads().state_dict().items():
        head, layer, rest = name.split(".", 2)
        linear = rest.startswith("linear.")
        renamed = f"blocks.{head}.layers.{layer}.{rest[7:]}" if linear else f"lm_heads.{head}.weight"
        if not drop or drop not in renamed:
            tensors[renamed] = tensor
    tensors |= {name.replace("__", "."): tensor for name, tensor in more.items()}
    sizes = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, "num_hidden_layers": 1}
    write_folder(folder, sizes | config, tensors, "model.safetensors")
    return tensors


def test_vllm_per_head(tmp_path: Path, target: Target) -> None:
    vllm_folder(tmp_path, {"medusa_fc_bias": True, "logit_scale": 1})
    assert open_folder(tmp_path).origin == "vLLM"
    assert_same_logits(tmp_path, reference_heads(), target)


def test_vllm_without_biases_leaves_those_in_the_file_alone(tmp_path: Path, target: Target) -> None:
    vllm_folder(tmp_path, {"medusa_fc_bias": False})
    reference = reference_heads()
    for head in reference:
        head[0].linear.bias.data.zero_()
    assert_same_logits(tmp_path, reference, target)


def test_vllm_with_fewer_heads_than_weights(tmp_path: Path) -> None:
    vllm_folder(tmp_path, {"num_heads": 2})
    assert read_config(tmp_path).num_heads == 2
    assert load_heads(tmp_path).layers[0].weight.shape[0] == 2


@pytest.mark.parametrize("name", ["lm_head__weight", "lm_heads__0__weight"])
@pytest.mark.parametrize("rows", ["whole", "reduced"])
def test_vllm_shared_and_reduced(tmp_path: Path, target: Target, name: str, rows: str) -> None:
    token_map = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:20]
    whole = torch.randn(VOCAB, HIDDEN)
    config = {"original_lm_head": True, "truncated_vocab_size": 20, "logit_scale": 0.5}
    written = whole if rows == "whole" else whole[token_map]
    vllm_folder(tmp_path, config, drop="lm_heads", token_map=token_map, **{name: written})
    found = read_config(tmp_path)
    assert (found.unembedding, found.draft_vocab_size, found.logit_scale) == ("shared", 20, 0.5)
    reference = reference_heads(vocab=20)
    for number, head in enumerate(reference):
        head[0].load_state_dict(reference_heads()[number][0].state_dict())
        head[1].weight.data.copy_(0.5 * whole[token_map])
    assert_same_logits(tmp_path, reference, target)


def test_vllm_ignores_a_token_map_for_the_whole_vocabulary(tmp_path: Path) -> None:
    vllm_folder(tmp_path, {"truncated_vocab_size": VOCAB}, token_map=torch.arange(VOCAB))
    assert read_config(tmp_path).draft_vocab_size is None


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"num_heads": 4}, "", "lm_heads.3.weight"),
    ({"num_heads": "3"}, "", "num_heads='3'"),
    ({"num_hidden_layers": 2}, "", "blocks.0.layers.1.weight"),
    ({"vocab_size": 70}, "", "vocab_size=70"),
    ({"vocab_size": "50"}, "", "vocab_size='50'"),
    ({"hidden_size": 8}, "", "asks for"),
    ({"truncated_vocab_size": 20}, "", "token_map"),
    ({"medusa_fc_bias": True}, "bias", "blocks.0.layers.0.bias"),
    ({"original_lm_head": True}, "lm_heads", "lm_head.weight"),
    ({}, "lm_heads", "lm_heads.0.weight"),
    ({}, "lm_heads.1", "lm_heads.1.weight"),
    ({}, "blocks.1", "blocks.1.layers.0.weight"),
    ({"logit_scale": -1.0}, "", "logit_scale=-1.0"),
    ({"vllm_medusa": {"num_heads": 3}}, "", "num_layers"),
]


@pytest.mark.parametrize(("config", "drop", "named"), BROKEN, ids=[named for _, _, named in BROKEN])
def test_what_is_wrong_with_a_vllm_folder_has_a_name(
    tmp_path: Path, config: dict[str, Any], drop: str, named: str
) -> None:
    vllm_folder(tmp_path, config, drop)
    with pytest.raises(MedusaError) as raised:
        read_config(tmp_path)
    assert named in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_without_heads_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, base_config(), base_tensors(), "model.safetensors")
    with pytest.raises(MedusaError, match="named like a Medusa head"):
        read_config(tmp_path)


def test_accelerators_that_guess_one_token_after_the_other_are_named(tmp_path: Path) -> None:
    """IBM's MLPSpeculator, as its repositories lie on the hub."""
    tensors = {f"{part}.0.weight": torch.ones(8, 8) for part in ("emb", "proj", "head", "ln")}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MedusaError, match=r"model_type='mlp_speculator': its heads read the token .*vllm-medusa train"):
        load_heads(tmp_path)


def test_a_gap_between_heads_or_layers_is_named(tmp_path: Path) -> None:
    state = reference_heads(layers=2).state_dict()
    for missing in ("1.0.linear.weight", "2.1.linear.weight"):
        short = {name: x for name, x in state.items() if not name.startswith(missing[:4])}
        write_folder(tmp_path, FASTER, short, "medusa_lm_head.pt")
        with pytest.raises(MedusaError, match=rf"blocks\.{missing[0]}\.layers\.{missing[2]}"):
            read_config(tmp_path)


def test_four_bit_and_whole_number_weights_are_refused(tmp_path: Path) -> None:
    state = {f"medusa_heads.{name}": tensor for name, tensor in reference_heads().state_dict().items()}
    name = "medusa_heads.0.0.linear.weight"
    write_folder(tmp_path, MODELOPT, state | {f"{name}_scale_2": torch.tensor(1.0)}, "model.safetensors")
    with pytest.raises(MedusaError, match="4 bits"):
        read_config(tmp_path)
    write_folder(tmp_path, MODELOPT, state | {name: torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)}, "model.safetensors")
    with pytest.raises(MedusaError, match=r"int8.*bfloat16"):
        load_heads(tmp_path)


def test_the_fix_for_a_wrong_config_works(tmp_path: Path, target: Target) -> None:
    vllm_folder(tmp_path, {"num_heads": 4})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_heads": 3}))
    assert_same_logits(tmp_path, reference_heads(), target)
    assert len(load_file(tmp_path / "model.safetensors")) == 9


WRAPPED = [
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "base_model.model.module.",
]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_heads_saved_from_wrapped_modules(wrapper: str, file: str, tmp_path: Path, target: Target) -> None:
    """DataParallel, torch.compile and PEFT leave their names before those of the heads, or between them."""
    reference = reference_heads()
    tensors = {f"{wrapper}medusa_head._orig_mod.{name}": x for name, x in reference.state_dict().items()}
    write_folder(tmp_path, FASTER, tensors, file)
    assert open_folder(tmp_path).origin == "FasterDecoding"
    assert_same_logits(tmp_path, reference, target)


def test_our_own_heads_saved_from_a_wrapped_module(tmp_path: Path, target: Target) -> None:
    heads = MedusaHeads(HeadsConfig(num_heads=2, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB, top_k=5))
    save_heads(heads, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"module._orig_mod.{name}": x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    assert all(torch.equal(x, tensors[name]) for name, x in load_heads(tmp_path).state_dict().items())


def test_one_tensor_wrapped_and_plain_is_refused(tmp_path: Path) -> None:
    state = reference_heads().state_dict()
    write_folder(
        tmp_path, FASTER, {**state, **{f"module.{name}": x + 1 for name, x in state.items()}}, "model.safetensors"
    )
    with pytest.raises(MedusaError, match="the same tensor twice"):
        read_config(tmp_path)
