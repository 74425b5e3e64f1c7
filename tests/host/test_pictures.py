"""Prompts with pictures, mixed with text: plain vLLM's tokens, with real processors. V2: `test_kinds_of_targets.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MAX_LEN, Oracle, random_prompts, random_tree, start
from picture_targets import KINDS, OPTIONS, architecture, asked, requests, save_picture_target
from tiny_targets import inspected_here

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a kind of model and of heads for it, made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            made[kind] = save_picture_target(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_between_texts(target: Any, kind: str) -> None:
    """Greedy and seeded, one with two pictures, with the prefix cache; prompts in pieces beside trees."""
    from vllm import SamplingParams

    model, heads = target(kind)
    options = {**OPTIONS, "max_model_len": MAX_LEN, "max_num_seqs": 3}
    params = [SamplingParams(max_tokens=36, ignore_eos=True, temperature=i % 2, seed=i) for i in range(5)]
    with inspected_here(architecture(model)):
        plain = start(model, **options)
        told = asked(plain, requests(), params)
        trees = start(model, heads, medusa={"num_speculative_tokens": 12, "adaptive": False}, **options)
    assert plain.runner.uses_mrope == (kind in ("paddleocr_vl", "qwen3_vl"))
    assert asked(plain, requests(blank=True), params)[0][1] != told[0][1], "what is in a picture matters"
    assert asked(trees, requests(), params) == told
    vocab = trees.llm.llm_engine.model_config.get_vocab_size()
    trees.runner._draft = Oracle(trees, dict(told), lambda rng: random_tree(rng, 12), vocab=vocab)
    trees.runner.medusa_report(reset=True)
    for _ in range(2):  # the second time from the prefix cache
        assert asked(trees, requests(), params) == told
    assert trees.runner.medusa_report()["mean_accepted_length"] > 2


@pytest.mark.skipif(not os.environ.get("MEDUSA_LONG"), reason="texts between pictures are above")
def test_its_text_alone(target: Any) -> None:
    """With vLLM's `language_model_only`."""
    from vllm import SamplingParams

    model, heads = target("idefics3")
    options = {"max_model_len": MAX_LEN, "block_size": 32, "language_model_only": True}
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=i % 2, seed=i) for i in range(4)]
    prompts = random_prompts(np.random.default_rng(3), [3, 8, 21, 33])
    with inspected_here(architecture(model)):
        truth = start(model, **options).tokens(prompts, params)
        trees = start(model, heads, medusa={"num_speculative_tokens": 12, "adaptive": False}, **options)
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, truth, strict=True)}
    vocab = trees.llm.llm_engine.model_config.get_vocab_size()
    trees.runner._draft = Oracle(trees, by_prompt, lambda rng: random_tree(rng, 12), vocab=vocab)
    assert trees.tokens(prompts, params) == truth
    assert trees.runner.medusa_report()["mean_accepted_length"] > 2
