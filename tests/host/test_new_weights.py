"""Weights that change while an engine lives: heads draft with the target's new ones, and come back after a sleep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_LEN, VOCAB, start
from new_weights import OPTIONS, WAYS, change
from tiny_llama import save_llama, save_random_heads
from vllm import SamplingParams

from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, save_heads

pytestmark = pytest.mark.slow  # engines start


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's sizes, other weights."""
    folder = tmp_path_factory.mktemp("other-llama")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": VOCAB - 1, "bos_token_id": 1}
    save_llama(folder, seed=8, vocab_size=VOCAB, max_position_embeddings=MAX_LEN, **ends, **sizes)
    return folder


@pytest.fixture(scope="module")
def reduced_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that guess 90 of the tokens, every second first."""
    folder = tmp_path_factory.mktemp("reduced-heads")
    torch.manual_seed(4)
    sizes = {"hidden_size": 128, "vocab_size": VOCAB, "draft_vocab_size": 90}
    save_random_heads(folder, num_heads=3, num_layers=1, root_conditioned=True, **sizes)
    heads = load_heads(folder)
    heads.token_map.copy_(torch.cat([torch.arange(0, VOCAB, 2), torch.arange(1, 21, 2)]))
    save_heads(heads, folder)
    return folder


def is_right(run: dict[str, Any]) -> None:
    assert run["differ"] and run["right"]
    assert run["old"] != run["guesses"]
    assert run["guesses"] == run["wanted"]
    assert run["is draft model"]
    assert run["report"]["request_steps"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_on_v1(tiny_model: Path, reduced_heads: Path, other_model: Path, way: str) -> None:
    """In bfloat16, where heads are frozen into bytes."""
    run = change(tiny_model, reduced_heads, other_model, way, dtype="bfloat16")
    is_right(run)
    before, after = run["frozen"]
    assert before == after


@pytest.mark.parametrize("way", WAYS)
def test_on_v2(ask: Callable[..., Any], tiny_model: Path, reduced_heads: Path, other_model: Path, way: str) -> None:
    is_right(ask("change_weights", other_model, way, pair=(tiny_model, reduced_heads)))


def test_written_by_hand(tiny_model: Path, reduced_heads: Path) -> None:
    """Whoever writes into parameters by itself says so."""
    engine = start(tiny_model, reduced_heads, dtype="bfloat16", **OPTIONS)
    heads, params = engine.runner.drafter.heads, SamplingParams(temperature=0.0, max_tokens=3)
    row = int(heads.token_map[7])
    with torch.no_grad():
        engine.runner.model.lm_head.weight[row] = 3.0
    engine.tokens([[3, 4, 5]], params)
    assert (heads.unembedding_weight()[0, 7] != 3.0).any(), "nobody has told"
    frozen = heads._frozen
    engine.llm.collective_rpc("medusa_rebind")
    engine.tokens([[3, 4, 5]], params)
    assert (heads.unembedding_weight()[0, 7] == 3.0).all()
    assert frozen is None or heads._frozen is not frozen


def test_new_weights_of_the_heads(tiny_model: Path, reduced_heads: Path) -> None:
    """A host that was sent trained heads hands them over by `load_weights`; the copy in bytes follows."""
    from vllm_medusa.config import SETTINGS_KEY, Settings
    from vllm_medusa.proposer import MedusaProposer

    class Config:
        settings = Settings(heads=str(reduced_heads), num_speculative_tokens=5)
        additional_config = {SETTINGS_KEY: settings.model_dump(mode="json")}  # noqa: RUF012

    from transformers import AutoModelForCausalLM

    proposer = MedusaProposer(Config())
    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    proposer.load_model(target)
    hidden, roots = torch.randn(2, 128).to(torch.bfloat16), torch.tensor([3, 4])
    before = proposer.propose(hidden, roots)
    assert proposer.model is proposer.heads
    sent = {name: -weight for name, weight in proposer.model.state_dict().items() if name != "token_map"}
    assert proposer.model.load_weights(sent.items()) == set(sent)
    after = proposer.propose(hidden, roots)
    assert (before.reach != after.reach).any()
    again = MedusaProposer(Config())
    again.load_model(target)
    for parameter in again.heads.parameters():
        parameter.data.neg_()
    again.heads.freeze()
    assert (again.propose(hidden, roots).tokens == after.tokens).all()
    with pytest.raises(MedusaError, match="weight of the heads='lm_head'"):
        proposer.model.load_weights([("lm_head", hidden)])
    with pytest.raises(MedusaError, match="shape of the heads"):
        proposer.model.load_weights([("root", hidden)])
