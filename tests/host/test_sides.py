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
    """`VLLM_COMPUTE_NANS_IN_LOGITS`: three NaNs at the root of the second request, nobody else has any."""
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
                planted.append(len(trees.requests))
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", compute_logits)
    planted: list[int] = []  # requests of the step, if there is something to tell of it
    steps: list[tuple[int, dict[str, int]]] = []
    for name, prompt in zip(("first", "second", "third"), prompts, strict=True):
        host.add_request(name, {"prompt_token_ids": prompt}, asked)
    core = host.engine_core.engine_core
    while core.scheduler.has_requests():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        told = {
            output.request_id.split("-")[0]: output.num_nans_in_logits
            for by_client in (outputs or {}).values()
            for output in by_client.outputs
        }
        steps += [(planted.pop(), told)] if planted else []
    assert any(requests == 3 for requests, _ in steps)
    for _, told in steps:
        assert told.pop("second") == 3 and not any(told.values())
    host.output_processor.abort_requests([*host.output_processor.request_states], internal=True)
