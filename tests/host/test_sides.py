"""Sides of vLLM that take one row for each request: told of the rows on its path, and of nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import VOCAB, Oracle, random_prompts, random_tree

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("choosing", [{}, {"logprobs": 1}], ids=["likeliest", "by depth"])
def test_not_a_number_is_told_of_the_request_that_met_it(tiny, tiny_medusa, drafting, monkeypatch, choosing):
    """`VLLM_COMPUTE_NANS_IN_LOGITS`: three NaNs at the root of the second request, and nobody else has any."""
    from vllm import SamplingParams, envs

    monkeypatch.setattr(envs, "VLLM_COMPUTE_NANS_IN_LOGITS", True, raising=False)  # once read, the variable is kept
    runner, host = tiny_medusa.runner, tiny_medusa.llm.llm_engine
    prompts = random_prompts(np.random.default_rng(5), [5, 6, 7])
    asked = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **choosing)
    truth = tiny.tokens(prompts, asked)
    answers = {tuple(p): [*a, *[5] * 8] for p, a in zip(prompts, truth, strict=True)}
    drafting(Oracle(tiny_medusa, answers, lambda rng: random_tree(rng, 12), misses=0.0, vocab=VOCAB))
    compute = runner.model.compute_logits

    def compute_logits(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        logits = compute(hidden, *args)
        trees = runner.trees
        if trees is not None and trees.num_nodes and len(logits) == trees.num_tokens:
            row = next((i for i, name in enumerate(trees.requests) if name.startswith("second")), None)
            if row is not None:
                logits[trees.first_logit[row], :3] = torch.nan
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", compute_logits)
    told = {"first": 0, "second": 0, "third": 0}
    for name, prompt in zip(told, prompts, strict=True):
        host.add_request(name, {"prompt_token_ids": prompt}, asked)
    core = host.engine_core.engine_core
    while core.scheduler.has_requests():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        for output in (o for by_client in (outputs or {}).values() for o in by_client.outputs):
            name = output.request_id.split("-")[0]
            told[name] = max(told[name], output.num_nans_in_logits)
    assert told == {"first": 0, "second": 3, "third": 0}
    host.output_processor.abort_requests([*host.output_processor.request_states], internal=True)
