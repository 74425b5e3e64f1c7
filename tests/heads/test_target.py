"""The target's two matrices, found by name in its own files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.target import read_target

ROWS = {name: torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abc")}


def written(folder: Path, **tensors: str) -> Path:
    """A folder whose weights hold, by name (with "__" for "."), one of the matrices ROWS."""
    save_file(
        {name.replace("__", "."): ROWS[which].clone() for name, which in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("tensors", "unembedding", "embedding"),
    [
        ({"lm_head__weight": "a", "model__embed_tokens__weight": "b"}, "a", "b"),
        ({"model__embed_tokens__weight": "b"}, "b", "b"),
        ({"transformer__wte__weight": "b", "lm_head__weight": "a"}, "a", "b"),
        ({"transformer__wte__weight": "c"}, "c", "c"),
        ({"lm_head__weight": "a"}, "a", "a"),
        ({"language_model__lm_head__weight": "a", "language_model__model__embed_tokens__weight": "c"}, "a", "c"),
    ],
    ids=["both", "tied", "wte", "wte tied", "lm_head only", "nested"],
)
def test_found_by_name(tmp_path: Path, tensors: dict[str, str], unembedding: str, embedding: str) -> None:
    found = read_target(written(tmp_path, **tensors))
    assert torch.equal(found[0], ROWS[unembedding]) and torch.equal(found[1], ROWS[embedding])
    assert (found[0] is found[1]) == (unembedding == embedding), "a tied matrix is read once"


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match=r"model='.*nowhere': no such folder"):
        read_target(tmp_path / "nowhere")


def test_weights_without_an_embedding_are_named(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="no embed_tokens or lm_head"):
        read_target(written(tmp_path, encoder__weight="a"))


@pytest.mark.parametrize("part", ["qweight", "weight_packed"])
def test_a_packed_unembedding_is_named(tmp_path: Path, part: str) -> None:
    """The embedding must not stand in for it: heads would learn another model's tokens."""
    tensors = {f"lm_head__{part}": "a", "lm_head__weight_scale": "b", "model__embed_tokens__weight": "c"}
    with pytest.raises(MedusaError, match=rf"model.safetensors='lm_head.{part}': a quantized matrix"):
        read_target(written(tmp_path, **tensors))


def test_an_unembedding_in_bytes_is_named(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": torch.ones(6, 4, dtype=torch.int8), "model.embed_tokens.weight": ROWS["c"]}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MedusaError, match=r"model.safetensors: lm_head.weight='torch.int8': a quantized matrix"):
        read_target(tmp_path)
