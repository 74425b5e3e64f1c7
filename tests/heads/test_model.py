"""The stacked heads against one head written out after the paper, row by row in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.config import Calibration, HeadsConfig
from vllm_medusa.heads.model import MedusaHeads

Target = tuple[torch.Tensor, torch.Tensor]


def naive_logits(heads: MedusaHeads, hidden: torch.Tensor, root: int, head: int, target: Target) -> torch.Tensor:
    """One head on one row [H], float64 [Vd]: residual blocks, then the unembedding."""
    state = {name: tensor.double() for name, tensor in heads.state_dict().items() if name != "token_map"}
    row = hidden.double()
    if heads.config.trunk_size is not None:
        inner = state["trunk.weight"] @ row + state["root"] @ target[1][root].double() + state["trunk.bias"]
        row = row + state["trunk.out"][head] @ (inner * torch.sigmoid(inner)) + state["trunk.out_bias"][head]
    for layer in range(heads.config.num_layers):
        inner = state[f"layers.{layer}.weight"][head] @ row
        if heads.config.bias:
            inner = inner + state[f"layers.{layer}.bias"][head]
        if layer == 0 and heads.config.root_conditioned and heads.config.trunk_size is None:
            inner = inner + state["root"][head] @ target[1][root].double()
        row = row + inner * torch.sigmoid(inner)
    if heads.config.unembedding == "target":
        matrix = target[0].double()
        matrix = matrix if heads.token_map is None else matrix[heads.token_map]
    else:
        matrix = state["unembedding"][0 if heads.config.unembedding == "shared" else head]
    return heads.config.logit_scale * (matrix @ row)


def assert_written_out(heads: MedusaHeads, target: Target) -> None:
    """Three bound heads say what `naive_logits` says."""
    hidden, roots = torch.randn(5, heads.config.hidden_size), torch.tensor([0, 3, 49, 3, 7])
    logits = heads(hidden, roots)
    for row in range(5):
        for head in range(3):
            wanted = naive_logits(heads, hidden[row], int(roots[row]), head, target)
            # float32 sums of 16 to 40 products against float64 ones
            torch.testing.assert_close(logits[row, head].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unembedding", ["target", "shared", "per_head"])
@pytest.mark.parametrize("root_conditioned", [False, True])
@pytest.mark.parametrize("shape", [(1, True, None), (2, True, 20), (3, False, 20), (1, False, None)])
def test_stacked_heads_equal_heads_written_out(
    make_heads: Callable[..., MedusaHeads],
    target: Target,
    unembedding: str,
    root_conditioned: bool,
    shape: tuple[int, bool, int | None],
) -> None:
    layers, bias, reduced = shape
    heads = make_heads(
        num_layers=layers,
        bias=bias,
        draft_vocab_size=reduced,
        unembedding=unembedding,
        root_conditioned=root_conditioned,
        logit_scale=0.7,
    )
    heads.bind(*target)
    assert_written_out(heads, target)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_heads_on_a_trunk_equal_heads_written_out(
    make_heads: Callable[..., MedusaHeads], target: Target, num_layers: int
) -> None:
    heads = make_heads(num_layers=num_layers, root_conditioned=True, trunk_size=40, draft_vocab_size=20)
    heads.bind(*target)
    assert_written_out(heads, target)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"trunk_size": 8}, "root_conditioned heads only"), ({"root_conditioned": True, "num_layers": 0}, "trunk_size")],
)
def test_shapes_that_cannot_be_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HeadsConfig(**{"num_heads": 2, "num_layers": 1, "hidden_size": 8, "vocab_size": 20} | options)


def test_candidates_are_the_best_tokens_with_calibrated_probabilities(
    make_heads: Callable[..., MedusaHeads], target: Target
) -> None:
    calibration = Calibration(temperatures=[0.5, 1.0, 3.0], rank_accuracy=[[0.1] * 5] * 3)
    heads = make_heads(draft_vocab_size=20, root_conditioned=True, calibration=calibration, logit_scale=1.5)
    heads.bind(*target)
    hidden, roots = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    tokens, probabilities = heads.candidates(hidden, roots, 5)
    assert tokens.shape == probabilities.shape == (4, 3, 5)
    assert tokens.dtype == torch.int64 and probabilities.dtype == torch.float32
    everything = (heads(hidden, roots).double() / torch.tensor([0.5, 1.0, 3.0])[None, :, None]).softmax(-1)
    best = everything.topk(5, dim=-1)
    torch.testing.assert_close(probabilities.double(), best.values, rtol=1e-4, atol=1e-5)
    assert heads.token_map is not None
    assert torch.equal(tokens, heads.token_map[best.indices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads_keep_probabilities_in_float32(
    make_heads: Callable[..., MedusaHeads], target: Target, dtype: torch.dtype
) -> None:
    heads = make_heads(root_conditioned=True).to(dtype)
    heads.bind(target[0].to(dtype), target[1].to(dtype))
    found = heads.candidates(torch.randn(2, 16).to(dtype), torch.tensor([1, 2]), 5)
    assert found.probabilities.dtype == torch.float32
    assert bool((found.probabilities.diff(dim=2) <= 0).all())
    assert bool((found.probabilities.sum(2) <= 1 + 1e-4).all())


def test_rows_do_not_depend_on_their_batch(make_heads: Callable[..., MedusaHeads], target: Target) -> None:
    heads = make_heads(root_conditioned=True, draft_vocab_size=20)
    heads.bind(*target)
    hidden, roots = torch.randn(9, 16), torch.arange(9)
    together = heads(hidden, roots)
    for row in range(9):
        alone = heads(hidden[row : row + 1], roots[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_plain_heads_do_not_look_at_the_root(make_heads: Callable[..., MedusaHeads], target: Target) -> None:
    heads = make_heads()
    heads.bind(*target)
    hidden = torch.randn(2, 16)
    assert torch.equal(heads(hidden, None), heads(hidden, torch.tensor([5, 6])))


def test_untrained_heads_repeat_the_targets_own_guess(target: Target) -> None:
    heads = MedusaHeads(HeadsConfig(num_heads=2, hidden_size=16, vocab_size=50, num_layers=2, root_conditioned=True))
    heads.bind(*target)
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(heads(hidden, torch.tensor([0, 1, 2]))[:, 1], hidden @ target[0].T)


def test_an_undivided_vocabulary_shares_the_targets_memory(
    make_heads: Callable[..., MedusaHeads], target: Target
) -> None:
    heads = make_heads()
    heads.bind(*target)
    assert heads.unembedding_weight().data_ptr() == target[0].data_ptr()


def test_unbound_heads_say_so(make_heads: Callable[..., MedusaHeads]) -> None:
    with pytest.raises(MedusaError, match="bind"):
        make_heads()(torch.randn(1, 16), None)


def test_root_conditioned_heads_without_roots_say_so(make_heads: Callable[..., MedusaHeads], target: Target) -> None:
    heads = make_heads(root_conditioned=True)
    heads.bind(*target)
    with pytest.raises(MedusaError, match="root"):
        heads(torch.randn(1, 16), None)


def test_a_target_of_another_width_is_refused(make_heads: Callable[..., MedusaHeads]) -> None:
    with pytest.raises(MedusaError, match=r"\[50, 8\]"):
        make_heads().bind(torch.randn(50, 8), torch.randn(50, 8))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_candidates_are_distinct_and_descending(batch: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = MedusaHeads(
        HeadsConfig(num_heads=2, num_layers=1, hidden_size=4, vocab_size=9, top_k=5, draft_vocab_size=7)
    )
    heads.bind(*torch.randn(2, 9, 4, generator=generator))
    tokens, probabilities = heads.candidates(torch.randn(batch, 4, generator=generator), None, k)
    assert bool((probabilities.diff(dim=2) <= 0).all())
    assert all(len(set(row.tolist())) == k for row in tokens.reshape(-1, k))
