"""Quantized targets, their unembedding too: trees give the tokens of plain vLLM on the same checkpoint.

Those are all kinds that vLLM 0.32 runs on a CPU, but for FP8, whose kernel takes a minute for what the others do in one
second (docs/targets.md says what was seen by hand).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engine, Oracle, random_prompts, random_tree, start
from quantized import KINDS, save_quantized
from tiny_llama import save_llama, save_random_heads

pytestmark = pytest.mark.slow

# Logits of a random model are large, up to 20, where bfloat16 has steps of 0.125. In the same comparison the plain
# weights, not quantized, differ by 0.009 in a token's log-probability on average, 0.07 at most; quantized ones by 0.011
# and 0.25, since what is rounded here is rounded again in the next layer's input.
ROUNDING = 0.03
TIE = 0.5  # two log-probabilities, each off by as much as that
SETTINGS: dict[str, Any] = {"max_model_len": 256, "block_size": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose sizes all kernels take."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_llama(folder, seed=7, vocab_size=192, **sizes)
    return folder


def heads_for(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    """Random heads that read the root, through the target's own unembedding."""
    torch.manual_seed(11)
    save_random_heads(
        folder, num_heads=4, num_layers=1, root_conditioned=True, hidden_size=hidden_size, vocab_size=vocab_size
    )
    return folder


def assert_heads_read_the_unembedding(engine: Engine) -> None:
    """Candidates are the best of what the target's own unembedding, as it is, makes of the heads' rows."""
    heads = engine.runner.drafter.heads
    hidden = torch.randn(
        6, heads.config.hidden_size, dtype=engine.runner.dtype, generator=torch.Generator().manual_seed(1)
    )
    roots = torch.arange(6)
    with torch.inference_mode():
        states = heads.states(hidden, roots)
        logits = engine.runner.model.compute_logits(states.flatten(0, 1)).float()
        tokens, probabilities = heads.candidates(hidden, roots, 5)
    wanted = logits.softmax(-1).topk(5)
    chosen = logits.softmax(-1).gather(1, tokens.flatten(0, 1))
    torch.testing.assert_close(
        chosen, wanted.values, rtol=1e-3, atol=1e-5
    )  # other tokens only where they are as likely
    torch.testing.assert_close(probabilities.flatten(0, 1), wanted.values, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("lm_head", [False, True], ids=["layers", "layers and unembedding"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("fp8")])
def test_tokens_of_plain_vllm(plain: Path, tmp_path: Path, kind: str, lm_head: bool) -> None:
    """In bfloat16, the one format of these kernels, attention to a tree rounds otherwise than the host's: see TIE."""
    from vllm import SamplingParams

    folder = save_quantized(plain, tmp_path / "quantized", kind, lm_head=lm_head)
    engine = start(folder, dtype="bfloat16", **SETTINGS)
    method = type(engine.runner.model.lm_head.quant_method).__name__
    assert method.startswith("Unquantized") != lm_head
    prompts = random_prompts(np.random.default_rng(3), [3, 8, 21, 33, 5, 40], 192)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=8)
    answers = engine.answer(prompts, params)
    medusa = start(
        folder,
        heads_for(tmp_path / "heads", 128, 192),
        dtype="bfloat16",
        medusa={"num_speculative_tokens": 12, "adaptive": False},
        **SETTINGS,
    )
    assert_heads_read_the_unembedding(medusa)
    by_prompt = {tuple(prompt): list(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)}
    for planted in (False, True):
        if planted:
            medusa.runner._draft = Oracle(medusa, by_prompt, lambda rng: random_tree(rng, 12), vocab=192)
        assert_differ_by_roundings(medusa.answer(prompts, params), answers)
    report = medusa.runner.medusa_report()
    assert report["drafted_nodes"] > 500 and report["mean_accepted_length"] > 1.2


def assert_differ_by_roundings(found: list[Any], wanted: list[Any]) -> None:
    """The same tokens up to a tie, with the same log-probabilities but for roundings."""
    same, differences = 0, []
    for mine, truth in zip(found, wanted, strict=True):
        for ours, theirs, our_scores, scores in zip(
            mine.token_ids, truth.token_ids, mine.logprobs, truth.logprobs, strict=True
        ):
            if ours != theirs:
                assert ours in scores and scores[theirs].logprob - scores[ours].logprob < TIE
                break
            differences.append(abs(our_scores[ours].logprob - scores[theirs].logprob))
        else:
            same += 1
    assert same >= len(wanted) // 2
    assert float(np.mean(differences)) < ROUNDING


def test_exactly_the_same_in_float32(tmp_path: Path) -> None:
    """Bytes in sizes that AMX does not take go to oneDNN, in float32: greedy and seeded, not one token differs."""
    from vllm import SamplingParams

    sizes = {"hidden_size": 120, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_llama(tmp_path / "plain", seed=9, vocab_size=184, **sizes)
    folder = save_quantized(tmp_path / "plain", tmp_path / "quantized", "int8 (compressed-tensors)", lm_head=True)
    engine = start(folder, **SETTINGS)
    medusa = start(
        folder,
        heads_for(tmp_path / "heads", 120, 184),
        medusa={"num_speculative_tokens": 12, "adaptive": False},
        **SETTINGS,
    )
    prompts = random_prompts(np.random.default_rng(5), [3, 8, 21, 33, 5, 40], 184)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(6)]
    truth = engine.tokens(prompts, params)
    assert medusa.tokens(prompts, params) == truth
    assert_heads_read_the_unembedding(medusa)
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, truth, strict=True)}
    medusa.runner._draft = Oracle(medusa, by_prompt, lambda rng: random_tree(rng, 12), vocab=184)
    assert medusa.tokens(prompts, params) == truth
    assert medusa.runner.medusa_report()["mean_accepted_length"] > 1.5
