"""Requests that want to know different things share a batch, some arrive while others decode: each gets its own.

The truth is plain vLLM with one request at a time. In a mixed batch vLLM 0.32 itself shows named tokens (and token 0)
to a request that asked for the likeliest, as long as one that names tokens is in its company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import VOCAB, Engine, Oracle, random_prompts, random_tree, start
from test_request_edges import SIZES, same_logprobs

pytestmark = pytest.mark.slow
SHOWN: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": -1},
    {"logprob_token_ids": [3, 4, 5]},
    {"logprob_token_ids": [3, 4, 5, 6, 7]},
    {"logprob_token_ids": [3]},
    {"logprob_token_ids": [9, 3], "logprobs": 2},
    {"prompt_logprobs": 4},
    {"prompt_logprobs": 0, "logprob_token_ids": [8]},
    {"prompt_logprobs": 2, "logprobs": 3},
    {"logprob_token_ids": [0, 11], "flat_logprobs": True},
    {"logprobs": 2, "flat_logprobs": True},
]
CLOSE = 5e-4  # logits are as large as 50 here, and float32 rounds them by company
CHOOSING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 30, "seed": 3},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3},
]


def as_dicts(logprobs: Any) -> list[Any] | None:
    """By position, {token: Logprob}, whichever way they are kept."""
    return None if logprobs is None else [logprobs[place] for place in range(len(logprobs))]


def arriving(engine: Engine, prompts: list[list[int]], asked: list[Any], gap: int) -> list[Any]:
    """Answers to requests of which each one arrives `gap` steps after the one before."""
    host, finished = engine.llm.llm_engine, {}
    waiting = [*enumerate(zip(prompts, asked, strict=True))]
    step = 0
    while waiting or host.has_unfinished_requests():
        while waiting and waiting[0][0] * gap <= step:
            number, (prompt, params) = waiting.pop(0)
            host.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for output in host.step():
            if output.finished:
                finished[int(output.request_id)] = output
        step += 1
    return [finished[number] for number in range(len(prompts))]


def check(plain: Engine, trees: Engine, drafting: Any, fields: list[dict[str, Any]], gap: int, seed: int = 0) -> float:
    """Every answer in one batch is plain vLLM's to this request alone; returns the mean accepted length."""
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, rng.integers(2, 40, len(fields)).tolist())
    asked = [SamplingParams(**{"max_tokens": 14, "ignore_eos": True, **each}) for each in fields]
    truth = [
        plain.llm.generate([{"prompt_token_ids": p}], a, use_tqdm=False)[0] for p, a in zip(prompts, asked, strict=True)
    ]
    answers = {tuple(p): [*t.outputs[0].token_ids, *[5] * 8] for p, t in zip(prompts, truth, strict=True)}
    drafting(Oracle(trees, answers, lambda rng: random_tree(rng, 12), rng, 0.1, VOCAB))
    trees.runner.medusa_report(reset=True)
    for ours, theirs in zip(arriving(trees, prompts, asked, gap), truth, strict=True):
        same_logprobs(as_dicts(ours.prompt_logprobs), as_dicts(theirs.prompt_logprobs), CLOSE)
        (a,), (b,) = ours.outputs, theirs.outputs
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        same_logprobs(as_dicts(a.logprobs), as_dicts(b.logprobs), CLOSE)
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
    return float(trees.runner.medusa_report()["mean_accepted_length"])


def test_named_tokens_of_different_number(tiny, tiny_medusa, drafting):
    """Depths of a walk have as many columns, whoever still walks."""
    fields = [{"temperature": 0, "logprob_token_ids": ids} for ids in ([3, 4, 5], [3, 4, 5, 6, 7], [3], [3, 9])]
    assert check(tiny, tiny_medusa, drafting, fields, gap=0) > 1.5


def test_named_tokens_beside_a_request_that_wants_to_know_nothing(tiny, tiny_medusa, drafting):
    fields = [{"temperature": 0, "logprob_token_ids": [3, 4], "max_tokens": 3}, {"temperature": 0}, {"temperature": 0}]
    assert check(tiny, tiny_medusa, drafting, fields, gap=0) > 1.5


@pytest.mark.parametrize("shown", [{"logprob_token_ids": [3, 4, 5]}, {"logprobs": 5}, {"logprobs": -1}], ids=str)
def test_one_token_that_arrives_while_another_request_decodes(tiny, tiny_medusa, drafting, shown):
    """What `/generative_scoring` sends."""
    fields = [{"temperature": 0, "max_tokens": 30}, {"temperature": 0, "max_tokens": 1, **shown}] * 2
    assert check(tiny, tiny_medusa, drafting, fields, gap=2) > 1.5


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("choosing", CHOOSING, ids=str)
def test_everything_that_a_request_may_want_to_know_in_one_batch(tiny, tiny_medusa, drafting, choosing, gap):
    assert check(tiny, tiny_medusa, drafting, [{**choosing, **shown} for shown in SHOWN], gap) > 1.5


@pytest.mark.parametrize("seed", range(6))
def test_whatever_shares_a_batch(tiny, tiny_medusa, drafting, seed):
    """Drawn: what is wanted, how tokens are chosen, when a request ends and when the next one comes."""
    rng = np.random.default_rng([9, seed])
    fields = [
        {
            **CHOOSING[rng.integers(len(CHOOSING))],
            **SHOWN[rng.integers(len(SHOWN))],
            "max_tokens": int(rng.choice([1, 2, 5, 9, 20])),
        }
        for _ in range(14)
    ]
    check(tiny, tiny_medusa, drafting, fields, gap=int(rng.integers(0, 3)), seed=seed)


def test_processed_log_probabilities_of_named_tokens(tiny_model, tiny_heads, drafting):
    """After temperature and penalties, where the engine is told so."""
    options = {**SIZES, "logprobs_mode": "processed_logprobs"}
    plain = start(tiny_model, **options)
    trees = start(tiny_model, tiny_heads, **options, medusa={"num_speculative_tokens": 16, "adaptive": False})
    shown = [each for each in SHOWN if "logprob_token_ids" in each]
    fields = [{**choosing, **each} for choosing in CHOOSING for each in shown]
    check(plain, trees, drafting, fields, gap=0)
