"""Heads in and out of folders: round trips are exact, and everything that can be wrong with a folder has a name."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, load_heads, read_config, save_heads, save_vllm
from vllm_medusa.heads.model import MedusaHeads

Make = Callable[..., MedusaHeads]
SHAPES = [
    {},
    {"root_conditioned": True, "draft_vocab_size": 20},
    {"unembedding": "per_head", "num_layers": 1, "bias": False},
    {"unembedding": "shared", "draft_vocab_size": 20, "logit_scale": 0.5},
]


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of the folder's config.json; None removes a key."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def replace(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change one tensor of the folder, or drop it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    taken = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(taken).contiguous()}, file)


@pytest.fixture
def folder(make_heads: Make, tmp_path: Path) -> Path:
    """Good root-conditioned heads with a draft vocabulary."""
    return save_heads(make_heads(root_conditioned=True, draft_vocab_size=20), tmp_path / "heads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_our_format_round_trips_bit_by_bit(
    make_heads: Make, tmp_path: Path, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    heads = make_heads(**shape).to(dtype)
    read = load_heads(save_heads(heads, tmp_path / "heads"))
    assert read.config == heads.config == read_config(tmp_path / "heads")
    assert read.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor) and read.state_dict()[name].dtype == tensor.dtype


@pytest.mark.parametrize("shape", [{}, *SHAPES[2:], {"draft_vocab_size": 20, "num_layers": 3}])
def test_vllms_format_round_trips(
    make_heads: Make, tmp_path: Path, target: tuple[torch.Tensor, torch.Tensor], shape: dict[str, Any]
) -> None:
    heads = make_heads(**shape)
    heads.bind(*target)
    read = load_heads(save_vllm(heads, tmp_path / "vllm"))
    read.bind(*target)
    hidden = torch.randn(4, 16)
    assert torch.equal(read(hidden, None), heads(hidden, None))
    assert torch.equal(read.candidates(hidden, None, 5).tokens, heads.candidates(hidden, None, 5).tokens)


def test_vllms_own_model_would_find_every_tensor(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads(unembedding="per_head", num_layers=2)
    names = set(load_file(save_vllm(heads, tmp_path / "vllm") / "model.safetensors"))
    blocks = {f"blocks.{k}.layers.{j}.{part}" for k in range(3) for j in range(2) for part in ("weight", "bias")}
    assert names == blocks | {f"lm_heads.{k}.weight" for k in range(3)}
    raw = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert raw["num_heads"] == 3 and raw["num_hidden_layers"] == 2 and raw["medusa_fc_bias"] is True
    assert raw["truncated_vocab_size"] == raw["vocab_size"] == 50 and raw["original_lm_head"] is False


def test_vllm_cannot_express_root_conditioned_heads(make_heads: Make, tmp_path: Path, target: Any) -> None:
    with pytest.raises(MedusaError, match="root_conditioned"):
        save_vllm(make_heads(root_conditioned=True), tmp_path / "vllm", target[0])


def test_older_names_and_pickles_are_read(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads(unembedding="per_head", num_layers=1)
    save_vllm(heads, tmp_path)
    old = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        parts = name.split(".")
        old[f"{parts[1]}.0.linear.{parts[-1]}" if parts[0] == "blocks" else f"{parts[1]}.1.weight"] = tensor
    (tmp_path / "model.safetensors").unlink()
    torch.save(old, tmp_path / "medusa_lm_head.pt")
    read = load_heads(tmp_path)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor)


def test_a_whole_unembedding_beside_a_token_map_is_cut(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads(unembedding="shared", draft_vocab_size=20)
    save_vllm(heads, tmp_path)
    whole = torch.randn(50, 16)
    replace(tmp_path, "lm_head.weight", lambda _: whole)
    read = load_heads(tmp_path)
    assert read.unembedding is not None and read.token_map is not None
    assert torch.equal(read.unembedding[0], whole[read.token_map])


def test_draft_vocab_false_guesses_in_the_whole_vocabulary(folder: Path, target: Any) -> None:
    heads = load_heads(folder, draft_vocab=False)
    heads.bind(*target)
    assert heads(torch.randn(1, 16), torch.tensor([1])).shape == (1, 3, 50)


def test_draft_vocab_false_needs_an_unembedding_for_it(make_heads: Make, tmp_path: Path) -> None:
    save_heads(make_heads(unembedding="shared", draft_vocab_size=20), tmp_path)
    with pytest.raises(MedusaError, match="draft_vocab"):
        load_heads(tmp_path, draft_vocab=False)


BROKEN_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": "4"}, "num_heads='4'"),
    ({"num_heads": 0}, "num_heads=0"),
    ({"num_heads": True}, "num_heads=True"),
    ({"num_layers": 2.5}, "num_layers=2.5"),
    ({"num_head": 3}, "num_head=3"),
    ({"hidden_size": -1}, "hidden_size=-1"),
    ({"root_conditioned": 1}, "root_conditioned=1"),
    ({"unembedding": "mine"}, "unembedding='mine'"),
    ({"draft_vocab_size": 51}, "exceeds vocab_size 50"),
    ({"top_k": 21}, "exceeds the 20 tokens"),
    ({"logit_scale": float("nan")}, "logit_scale=nan"),
    ({"format": "vllm-medusa/9"}, "format='vllm-medusa/9'"),
    ({"model_type": "eagle"}, "model_type='eagle'"),
    ({"calibration": {"temperatures": [1.0], "rank_accuracy": [[0.5] * 5]}}, "per head"),
    ({"calibration": {"temperatures": [1.0, 0.0, 1.0], "rank_accuracy": [[0.5] * 5] * 3}}, "temperatures"),
    ({"calibration": {"temperatures": [1.0] * 3, "rank_accuracy": [[1.5] * 5] * 3}}, "rank_accuracy"),
    ({"calibration": {"temperatures": [1.0] * 3}}, "calibration.rank_accuracy"),
]


@pytest.mark.parametrize(("changes", "named"), BROKEN_CONFIGS, ids=[named for _, named in BROKEN_CONFIGS])
def test_a_bad_config_is_one_error_that_names_key_and_value(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, **changes)
    with pytest.raises(MedusaError) as raised:
        read_config(folder)
    assert named in str(raised.value) and "config.json" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 4}, r"\[3, 16, 16\]: the config asks for \[4, 16, 16\]"),
        ({"num_layers": 3}, "layers.2.weight"),
        ({"hidden_size": 8}, r"\[3, 16, 16\]: the config asks for \[3, 8, 8\]"),
        ({"draft_vocab_size": 19}, "token_map"),
        ({"unembedding": "shared"}, "unembedding"),
        ({"bias": False, "num_layers": 3}, "layers.2.weight"),
    ],
)
def test_a_config_for_other_weights_names_a_tensor(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, **changes)
    with pytest.raises(MedusaError, match=named):
        read_config(folder)


@pytest.mark.parametrize("name", ["layers.0.weight", "layers.1.bias", "root", "token_map"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    replace(folder, name, None)
    with pytest.raises(MedusaError, match=name):
        read_config(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["layers.1.weight", "root"])
def test_weights_that_are_not_numbers_are_named(folder: Path, name: str, value: float) -> None:
    replace(folder, name, lambda tensor: tensor.index_fill(0, torch.tensor([1]), value))
    with pytest.raises(MedusaError, match=name):
        load_heads(folder)


@pytest.mark.parametrize(
    "change",
    [lambda ids: ids + 40, lambda ids: ids - 60, lambda ids: ids * 0, lambda ids: ids.float()],
    ids=["too large", "negative", "repeated", "float"],
)
def test_a_bad_token_map_is_named(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    replace(folder, "token_map", change)
    with pytest.raises(MedusaError, match="token_map"):
        load_heads(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -100])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MedusaError, match=r"model\.safetensors"):
        read_config(folder)


class Malicious:
    """Would run code on loading."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


def test_a_pickle_with_code_is_refused_and_does_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"0.0.linear.weight": Malicious()}, folder / "medusa_lm_head.pt")
    with pytest.raises(MedusaError, match=r"medusa_lm_head\.pt"):
        load_heads(folder)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1, 2], protocol=2)], ids=["empty", "junk", "a list"])
def test_a_pickle_that_is_no_checkpoint_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "medusa_lm_head.pt").write_bytes(content)
    with pytest.raises(MedusaError, match=r"medusa_lm_head\.pt"):
        load_heads(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_a_config_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(MedusaError, match=r"config\.json"):
        read_config(folder)


def test_missing_folder_config_and_weights_are_told_apart(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MedusaError, match="no weights"):
        read_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MedusaError, match=r"config\.json"):
        read_config(folder)


def test_reading_the_config_reads_no_values(folder: Path) -> None:
    replace(folder, "root", lambda tensor: tensor * float("nan"))
    assert read_config(folder).root_conditioned  # shapes are right; load_heads is the one to complain


@pytest.mark.parametrize(("hidden", "vocab", "named"), [(8, 50, "hidden_size"), (16, 40, "vocab_size")])
def test_heads_for_another_target_are_refused(folder: Path, hidden: int, vocab: int, named: str) -> None:
    with pytest.raises(MedusaError, match=named):
        check_heads(read_config(folder), hidden, vocab)


def test_heads_fit_their_target_and_a_padded_one(folder: Path) -> None:
    check_heads(read_config(folder), 16, 50)
    check_heads(read_config(folder), 16, 64)
