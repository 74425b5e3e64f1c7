"""The target's two matrices, found by name in its own files."""

import json
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
        (
            {"output__weight": "a", "model__tok_embeddings__weight": "b", "model__layers__0__output__weight": "c"},
            "a",
            "b",
        ),
        (
            {"embed_out__weight": "a", "gpt_neox__embed_in__weight": "b", "gpt_neox__layers__0__wo__weight": "c"},
            "a",
            "b",
        ),
        ({"transformer__output_layer__weight": "a", "transformer__embedding__word_embeddings__weight": "b"}, "a", "b"),
        ({"model__embed_tokens__weight": "b", "model__layers__9__embed_tokens__weight": "a"}, "b", "b"),
        ({"vision_tower__embeddings__weight": "c", "model__embed_tokens__weight": "b"}, "b", "b"),
    ],
    ids=[
        *("both", "tied", "wte", "wte tied", "lm_head only", "nested"),
        *("InternLM2", "GPT-NeoX", "ChatGLM", "a draft layer's own", "a tower's own"),
    ],
)
def test_found_by_name(tmp_path: Path, tensors: dict[str, str], unembedding: str, embedding: str) -> None:
    found = read_target(written(tmp_path, **tensors))
    assert torch.equal(found.unembedding, ROWS[unembedding]) and torch.equal(found.embedding, ROWS[embedding])
    assert (found.unembedding is found.embedding) == (unembedding == embedding), "a tied matrix is read once"


def test_a_tied_unembedding_is_not_what_lies_there_all_the_same(tmp_path: Path) -> None:
    """vLLM does not load it either."""
    folder = written(tmp_path, lm_head__weight="a", model__embed_tokens__weight="b")
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    found = read_target(folder)
    assert found.unembedding is found.embedding and torch.equal(found.embedding, ROWS["b"])


CONFIGS: list[tuple[dict[str, object], float | None, float]] = [
    ({"model_type": "llama"}, None, 1.0),
    ({"model_type": "granite", "logits_scaling": 8.0}, None, 0.125),
    ({"model_type": "cohere"}, None, 0.0625),
    ({"model_type": "cohere", "logit_scale": 0.25}, None, 0.25),
    ({"model_type": "gemma2"}, 30.0, 1.0),
    ({"model_type": "gemma3", "text_config": {"final_logit_softcapping": 20.0}}, 20.0, 1.0),
    ({"model_type": "gemma3_text", "final_logit_softcapping": None}, None, 1.0),
    ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, None, 0.5),
]


@pytest.mark.parametrize(("config", "soft_cap", "scale"), CONFIGS)
def test_what_is_done_to_logits(
    tmp_path: Path, config: dict[str, object], soft_cap: float | None, scale: float
) -> None:
    folder = written(tmp_path, lm_head__weight="a", model__embed_tokens__weight="b")
    (folder / "config.json").write_text(json.dumps(config))
    found = read_target(folder)
    assert (found.soft_cap, found.scale) == (soft_cap, scale)


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
