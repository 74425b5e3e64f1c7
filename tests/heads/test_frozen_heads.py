"""Frozen heads against the same heads by torch."""

import shutil

import pytest
import torch

from vllm_medusa.heads import native
from vllm_medusa.heads.config import Calibration, HeadsConfig
from vllm_medusa.heads.frozen import FrozenHeads
from vllm_medusa.heads.model import MedusaHeads

VOCAB, HIDDEN = 700, 48
KINDS = {
    "plain": {},
    "plain, no bias": {"bias": False},
    "root": {"root_conditioned": True},
    "trunk": {"num_layers": 0, "trunk_size": 80, "root_conditioned": True},
    "own unembedding": {"unembedding": "shared", "draft_vocab_size": 301},
    "reduced": {"root_conditioned": True, "draft_vocab_size": 333},
    "one head": {"num_heads": 1},
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


def make(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> MedusaHeads:
    """Heads of a kind, filled at random and bound to a random target."""
    sizes = {"num_heads": 3, "num_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB, **KINDS[kind], **changes}
    config = HeadsConfig(**sizes)  # type: ignore[arg-type]
    temperatures = [1.0 + 0.3 * head for head in range(config.num_heads)]
    calibration = Calibration(temperatures=temperatures, rank_accuracy=[[0.5, 0.1]] * config.num_heads)
    heads = MedusaHeads(config.model_copy(update={"calibration": calibration, "logit_scale": 0.7}))
    generator = torch.Generator().manual_seed(len(kind))
    for parameter in heads.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    table = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    heads.to(dtype).bind(table, table)
    return heads.eval()


def in_bytes(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a matrix [..., M, H] once its rows are bytes with a scale each."""
    scales = weight.float().abs().amax(-1, keepdim=True) / 127
    return (weight.float() / scales).round() * scales


def by_torch(heads: MedusaHeads) -> MedusaHeads:
    """The same heads in float32, their matrices rounded as the frozen ones are."""
    assert heads._bound_embedding is None or heads._bound_embedding.shape == (VOCAB, HIDDEN)
    kind = MedusaHeads(heads.config)
    kind.load_state_dict(heads.state_dict())
    kind.float()
    for name, parameter in kind.named_parameters():
        if name.endswith(("weight", "root", "out", "unembedding")):
            parameter.data.copy_(in_bytes(parameter.data))
    table = torch.zeros(VOCAB, HIDDEN) if heads._bound_embedding is None else heads._bound_embedding.float()
    kind.bind(table, table)
    if kind._bound_unembedding is not None:
        kind._bound_unembedding = in_bytes(heads.unembedding_weight())
    return kind.eval()


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_those_of_matrices_in_bytes(kind: str, batch: int) -> None:
    heads = make(kind)
    exact = by_torch(heads)
    heads.freeze()
    assert heads._frozen is not None
    generator = torch.Generator().manual_seed(batch)
    hidden = (2 * torch.randn(batch, HIDDEN, generator=generator)).to(torch.bfloat16)
    roots = torch.randint(0, VOCAB, (batch,), generator=generator)
    assert heads._frozen.takes(hidden)
    found = heads.candidates(hidden, roots, 10)
    expected = exact.candidates(hidden.float(), roots, 10)
    torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=2e-4, atol=1e-6)
    scores = (exact(hidden.float(), roots) / torch.tensor(heads.config.calibration.temperatures)[:, None]).softmax(-1)
    places = found.tokens
    if heads.token_map is not None:
        places = torch.full((VOCAB,), -1).index_put((heads.token_map,), torch.arange(len(heads.token_map)))[places]
    torch.testing.assert_close(scores.gather(-1, places), found.probabilities, rtol=2e-4, atol=1e-6)


def test_rounding_hardly_moves_a_probability() -> None:
    heads = make("trunk")
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain = heads.candidates(hidden, torch.arange(4), 5)
    heads.freeze()
    frozen = heads.candidates(hidden, torch.arange(4), 5)
    torch.testing.assert_close(frozen.probabilities, plain.probabilities, rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("amx", [True, False])
def test_many_rows_other_types_and_other_shapes_go_to_torch(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    heads = make("plain")
    heads.freeze()
    assert heads._frozen is not None
    row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    assert heads._frozen.takes(row.expand(6, -1)) is not amx  # 18 rows of three heads: torch's, if it has AMX
    assert not heads._frozen.takes(row[:0]) and not heads._frozen.takes(row.float())
    assert heads.candidates(row.expand(6, -1), None, 2).tokens.shape == (6, 3, 2)
    for odd in (
        make("plain", torch.float32),
        make("plain", num_layers=2),
        make("trunk", num_layers=1),
        make("plain", unembedding="per_head"),
        make("plain", num_heads=17),
        make("trunk", trunk_size=72),
    ):
        odd.freeze()
        assert odd._frozen is None


def test_binding_again_thaws() -> None:
    heads = make("plain")
    heads.freeze()
    table = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    heads.bind(table, table)
    assert heads._frozen is None


def test_a_row_of_zeros_and_a_row_that_is_no_number() -> None:
    heads = make("plain")
    heads.layers[0].weight.data[:, 0] = 0  # type: ignore[union-attr]
    heads.freeze()
    hidden = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    hidden[1, 3] = float("nan")
    found = heads.candidates(hidden, None, 2)
    assert torch.isfinite(found.probabilities).all() and not found.probabilities[1].any()


def test_without_a_compiler_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    heads = make("plain")
    assert not FrozenHeads.suits(heads)
    heads.freeze()
    assert heads._frozen is None
