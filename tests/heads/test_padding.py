"""Vocabularies padded on either side, and heads in another number format than their target's."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_medusa.config import SETTINGS_KEY, Settings
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, load_heads, save_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer import MedusaProposer

Make = Callable[..., MedusaHeads]
Target = tuple[torch.Tensor, torch.Tensor]
SHAPES: list[dict[str, Any]] = [
    {},
    {"unembedding": "per_head"},
    {"unembedding": "shared"},
    {"root_conditioned": True, "draft_vocab_size": 40},
    {"unembedding": "shared", "draft_vocab_size": 40},
]
IDS = ["target", "per head", "shared", "reduced", "shared, reduced"]


def padded(target: Target) -> Target:
    """64 rows instead of 50; the padding would win every guess if it were looked at."""
    loud = torch.full((14, 16), 100.0)
    return torch.cat([target[0], loud]), torch.cat([target[1], loud])


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_padded_target_makes_no_difference(make_heads: Make, target: Target, shape: dict[str, Any]) -> None:
    hidden, roots = torch.randn(6, 16).abs(), torch.arange(6)
    plain, on_padded = make_heads(**shape), make_heads(**shape)
    plain.bind(*target)
    check_heads(on_padded.config, 16, 64)
    on_padded.bind(*padded(target))
    assert torch.equal(plain(hidden, roots), on_padded(hidden, roots))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_padded_heads_are_cut_to_their_target(make_heads: Make, target: Target, shape: dict[str, Any]) -> None:
    heads = make_heads(vocab_size=64, **shape)
    if heads.token_map is not None:
        heads.token_map.copy_(torch.randperm(64, generator=torch.Generator().manual_seed(3))[:40])
    if heads.unembedding is not None:
        ids = torch.arange(64) if heads.token_map is None else heads.token_map
        heads.unembedding.data[:, ids >= 50] = 100.0
    whole = None if heads.unembedding is None else heads.unembedding.data.clone()
    check_heads(heads.config, 16, 50)
    heads.bind(*target)
    ids = torch.arange(50) if heads.token_map is None else heads.token_map
    assert heads.config.vocab_size == 50 and heads.config.num_outputs == len(ids) <= 50 and int(ids.max()) < 50
    hidden, roots = torch.randn(6, 16).abs(), torch.arange(6)
    assert heads(hidden, roots).shape == (6, 3, len(ids))
    assert int(heads.candidates(hidden, roots, 5).tokens.max()) < 50
    states = heads.states(hidden, roots)
    matrix = target[0][ids][None] if whole is None else whole[:, : len(ids)]
    if whole is not None and "draft_vocab_size" not in shape:
        torch.testing.assert_close(heads(hidden, roots), (states.transpose(0, 1) @ matrix.mT).transpose(0, 1))
    heads.load_state_dict(heads.state_dict())  # config, parameters and map still fit each other
    MedusaHeads(heads.config).load_state_dict(heads.state_dict())


def test_padding_is_not_an_excuse_for_another_vocabulary(make_heads: Make, target: Target) -> None:
    for vocab in (51, 63, 50 + 1024 + 14):
        with pytest.raises(MedusaError, match="vocab_size"):
            check_heads(make_heads(vocab_size=vocab).config, 16, 50)
        with pytest.raises(MedusaError, match="lm_head"):
            make_heads(vocab_size=vocab).bind(*target)


def test_a_root_that_was_added_to_the_target_is_read(make_heads: Make, target: Target) -> None:
    heads = make_heads(root_conditioned=True)
    grown = tuple(torch.cat([matrix, torch.randn(1, 16)]) for matrix in target)
    heads.bind(*grown)
    assert torch.isfinite(heads(torch.randn(1, 16), torch.tensor([50]))).all()


def proposer_of(folder: Path, matrices: Target, dtype: torch.dtype, **attributes: int) -> MedusaProposer:
    """A proposer for the heads in `folder` on a target that consists of its two matrices."""
    settings = Settings(heads=str(folder), num_speculative_tokens=8)
    proposer = MedusaProposer(SimpleNamespace(additional_config={SETTINGS_KEY: settings.model_dump(mode="json")}))
    model = torch.nn.Module()
    for name, matrix in zip(("lm_head", "embed_tokens"), matrices, strict=True):
        layer = torch.nn.Embedding.from_pretrained(matrix.to(dtype))
        for attribute, value in attributes.items():
            setattr(layer, attribute, value)
        setattr(model, name, layer)
    proposer.load_model(model)
    return proposer


@pytest.mark.parametrize("vocab", [50, 64], ids=["heads not padded", "heads padded"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_the_hosts_own_padding_is_never_drafted(
    make_heads: Make, target: Target, tmp_path: Path, shape: dict[str, Any], vocab: int
) -> None:
    """vLLM keeps 64 rows for a model of 50 tokens, whatever the model's files say."""
    folder = save_heads(make_heads(vocab_size=vocab, **shape), tmp_path / "heads")
    proposer = proposer_of(folder, padded(target), torch.float32, org_vocab_size=50)
    draft = proposer.propose(torch.randn(20, 16).abs(), torch.arange(20))
    assert int(draft.tokens.max()) < 50


@pytest.mark.parametrize("on", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_any_number_format_drafts_on_any_target(
    make_heads: Make, target: Target, tmp_path: Path, shape: dict[str, Any], saved: torch.dtype, on: torch.dtype
) -> None:
    exact = make_heads(**shape)
    folder = save_heads(make_heads(**shape).to(saved), tmp_path / "heads")
    proposer = proposer_of(folder, target, on)
    hidden, roots = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)), torch.arange(4)
    draft = proposer.propose(hidden.to(on), roots)
    assert draft.tokens.shape == (4, 8) and (draft.sizes == 8).all()
    heads = proposer.heads
    assert heads is not None and {tensor.dtype for tensor in heads.parameters()} <= {on}
    exact.bind(*target)
    # bfloat16 keeps 8 bits: a sum of 16 products, three blocks deep, is right to about a few percent of its size.
    found, wanted = heads(hidden.to(on), roots).float(), exact(hidden, roots)
    assert float((found - wanted).abs().max()) < 0.06 * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_one_folder_may_differ_in_format(make_heads: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    heads = make_heads()
    heads.layers[0].bias.data = heads.layers[0].bias.data.to(dtype)
    read = load_heads(save_heads(heads, tmp_path)).to(dtype)
    assert {tensor.dtype for tensor in read.parameters()} == {dtype}
