"""Prompts with pictures, mixed with text: plain vLLM's tokens on both model runners, with real processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import picture_runs
import pytest
from engines import MAX_LEN, Oracle, random_tree, start
from interpreter import interpreted
from picture_targets import OPTIONS, SAVE, architecture, asked, requests, save_picture_target
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


@pytest.mark.parametrize("kind", SAVE)
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
    assert plain.runner.uses_mrope == (kind == "paddleocr_vl")
    assert asked(plain, requests(blank=True), params)[0][1] != told[0][1], "what is in a picture matters"
    assert asked(trees, requests(), params) == told
    vocab = trees.llm.llm_engine.model_config.get_vocab_size()
    trees.runner._draft = Oracle(trees, dict(told), lambda rng: random_tree(rng, 12), vocab=vocab)
    trees.runner.medusa_report(reset=True)
    for _ in range(2):  # the second time from the prefix cache
        assert asked(trees, requests(), params) == told
    assert trees.runner.medusa_report()["mean_accepted_length"] > 2


@pytest.fixture(scope="module")
def child() -> Any:
    """A process on Model Runner V2."""
    with interpreted() as child:
        yield child


@pytest.mark.parametrize("kind", SAVE)
def test_on_model_runner_v2(child: Any, target: Any, kind: str) -> None:
    """The same with our Triton kernels."""
    said, told, length = child.submit(picture_runs.compare, *target(kind)).result(timeout=300)
    assert said == told and length > 1.4


def test_image_tokens_that_see_each_other(child: Any, target: Any, tmp_path: Path) -> None:
    """Both ways, in prompts alone, beside trees in the same step: vLLM gets the ranges of what is left to it."""
    model, heads = picture_runs.both_ways(target("idefics3"), tmp_path)
    said, told, length = child.submit(picture_runs.compare, model, heads).result(timeout=300)
    assert said == told and length > 1.4
    one_way = child.submit(picture_runs.compare, *target("idefics3")).result(timeout=300)[1]
    assert told != one_way, "it matters who sees whom"
