"""What a request may ask of plain vLLM it gets with trees: the same tokens, seeds included (tiny Llama, float32)."""

from __future__ import annotations

import numpy as np
import pytest
from engines import Engine, Oracle, random_prompts, random_tree

pytestmark = pytest.mark.slow  # an engine starts

PROMPTS = random_prompts(np.random.default_rng(21), [4, 9, 31, 32, 33, 40, 64, 71])

CASES = {
    "seeded": {"temperature": 1.0, "seed": 5},
    "cool and seeded": {"temperature": 0.4, "seed": 6},
    "top-k and top-p": {"temperature": 1.2, "top_k": 12, "top_p": 0.8, "seed": 7},
    "min-p": {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "seed": 9,
    },
    "negative penalties": {"temperature": 0, "presence_penalty": -1.0, "frequency_penalty": -0.6},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.4},
    "logit bias": {"temperature": 0, "logit_bias": {5: 4.0, 17: -8.0, 33: 6.0}},
    "allowed tokens": {"temperature": 0.9, "seed": 3, "allowed_token_ids": list(range(10, 60))},
    "min tokens": {"temperature": 0.9, "seed": 4, "min_tokens": 9, "stop_token_ids": list(range(20, 70))},
    "stop tokens": {"temperature": 0.9, "seed": 4, "stop_token_ids": list(range(20, 40))},
    "log-probabilities": {"temperature": 0.7, "seed": 11, "logprobs": 5},
    "greedy log-probabilities": {"temperature": 0, "logprobs": 0},
}


def plain_and_trees(tiny: Engine, tiny_medusa: Engine, drafting, params, prompts=PROMPTS, seed=0):
    """Completions of both engines; the oracle drafts what the plain one said."""
    truth = tiny.answer(prompts, params)
    answers = {tuple(p): list(c.token_ids) + [0] * 8 for p, c in zip(prompts, truth, strict=True)}
    drafting(Oracle(tiny_medusa, answers, lambda rng: random_tree(rng, 14), np.random.default_rng(seed)))
    tiny_medusa.runner.medusa_report(reset=True)
    return truth, tiny_medusa.answer(prompts, params)


@pytest.mark.parametrize("name", CASES)
def test_same_tokens(tiny, tiny_medusa, drafting, name):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=40, **CASES[name])
    truth, found = plain_and_trees(tiny, tiny_medusa, drafting, params)
    assert [list(c.token_ids) for c in found] == [list(c.token_ids) for c in truth]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in truth]
    assert tiny_medusa.runner.medusa_report()["mean_accepted_length"] > 1.2
    if "logprobs" in CASES[name]:
        for ours, theirs in zip(found, truth, strict=True):
            assert len(ours.logprobs) == len(theirs.logprobs) == len(ours.token_ids)
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert list(a) == list(b)
                assert [a[t].logprob for t in a] == pytest.approx([b[t].logprob for t in b], abs=1e-4)


def test_bad_words_split_across_a_path(tiny, tiny_medusa, drafting):
    """A phrase is forbidden where its first token was accepted and its second drafted."""
    from vllm import SamplingParams

    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    said = tiny.tokens(PROMPTS, free)
    params = []
    for answer in said:
        p = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        p._bad_words_token_ids = [answer[2:4], answer[5:7], [answer[9]]]
        params.append(p)
    truth, found = plain_and_trees(tiny, tiny_medusa, drafting, params)
    assert [list(c.token_ids) for c in found] == [list(c.token_ids) for c in truth]
    assert [list(c.token_ids) for c in truth] != said


def test_a_mixed_batch(tiny, tiny_medusa, drafting):
    """Greedy, seeded and penalised requests together, each as if alone."""
    from vllm import SamplingParams

    kinds = [
        CASES[name] for name in ("seeded", "negative penalties", "top-k and top-p", "logit bias", "min tokens", "min-p")
    ]
    params = [SamplingParams(max_tokens=30, **kinds[i % len(kinds)]) for i in range(len(PROMPTS))]
    truth, found = plain_and_trees(tiny, tiny_medusa, drafting, params)
    assert [list(c.token_ids) for c in found] == [list(c.token_ids) for c in truth]


def test_every_max_tokens(tiny, tiny_medusa, drafting):
    """An answer may end at each place of an accepted path."""
    from vllm import SamplingParams

    prompts = PROMPTS * 2
    params = [SamplingParams(temperature=0, max_tokens=i + 1, ignore_eos=True) for i in range(len(prompts))]
    whole = tiny.tokens(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    answers = {tuple(p): a for p, a in zip(PROMPTS, whole, strict=True)}
    drafting(Oracle(tiny_medusa, answers, lambda rng: random_tree(rng, 14)))
    found = tiny_medusa.answer(prompts, params)
    for i, completion in enumerate(found):
        assert list(completion.token_ids) == whole[i % len(PROMPTS)][: i + 1]
        assert completion.finish_reason == "length"


def test_seeds_survive_partial_prefill(tiny_model, tiny_heads, tiny, drafting):
    """Stock vLLM on CPU dies when a seeded prompt is computed in pieces."""
    from engines import MAX_LEN, start
    from vllm import SamplingParams

    engine = start(
        tiny_model,
        tiny_heads,
        max_model_len=MAX_LEN,
        block_size=32,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        medusa={"num_speculative_tokens": 6, "adaptive": False},
    )
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    truth = tiny.tokens(PROMPTS, params)
    answers = {tuple(p): t + [0] * 8 for p, t in zip(PROMPTS, truth, strict=True)}
    drafting(Oracle(engine, answers, lambda rng: random_tree(rng, 6)))
    assert engine.tokens(PROMPTS, params) == truth
