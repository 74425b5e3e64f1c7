"""The kinds of models that people serve give plain vLLM's tokens: tiny random ones, float32, both model runners."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runs import greedy, seeded
from engines import MAX_LEN, Engine, Oracle, random_prompts, random_tree, start
from picture_runs import compare_pictures, seeing_both_ways
from picture_targets import KINDS as KINDS_WITH_PICTURES
from picture_targets import save_picture_target
from tiny_targets import add_cache_scales, inspected_here, make_expert_group, save_target

from vllm_medusa.kept import Kept

pytestmark = pytest.mark.slow  # engines start
# vLLM's own refusal elsewhere: "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
needs_float8 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="no AVX-512")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a kind of model and of heads for it, made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            made[kind] = save_target(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def started(model: Path, heads: Path | None = None, **options: Any) -> Engine:
    """An engine for it, with trees of up to 12 nodes where there are heads."""
    architectures = json.loads((model / "config.json").read_text())["architectures"]
    medusa = {"medusa": {"num_speculative_tokens": 12, "adaptive": False, **options.pop("medusa", {})}} if heads else {}
    make_expert_group()
    with inspected_here(*architectures):
        return start(model, heads, **{"max_model_len": MAX_LEN, "block_size": 32, **medusa, **options})


def assert_same(plain: Engine, trees: Engine) -> None:
    """Heads draft, then an oracle does, in a batch of greedy and seeded requests; what it plants is accepted."""
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(3), [3, 8, 21, 33, 60, 90])
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=i % 2, seed=i) for i in range(6)]
    truth = plain.tokens(prompts, params)
    assert all(len(set(answer)) > 8 for answer in truth), "answers that wander"
    assert trees.tokens(prompts, params) == truth
    by_prompt = {tuple(prompt): answer for prompt, answer in zip(prompts, truth, strict=True)}
    trees.runner.medusa_report(reset=True)
    trees.runner._draft = Oracle(trees, by_prompt, lambda rng: random_tree(rng, 12))
    assert trees.tokens(prompts, params) == truth
    assert trees.runner.medusa_report()["mean_accepted_length"] > 2


KINDS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("kind", KINDS)
def test_on_model_runner_v1(target: Any, kind: str) -> None:
    model, heads = target(kind)
    assert_same(started(model), started(model, heads))


# With our Triton kernels; `make test-long` has the attention of CPUs too, which Model Runner V1 has above.
V2_ATTENTION = ["TRITON_ATTN", *(["CPU_ATTN"] if os.environ.get("MEDUSA_LONG") else [])]


@pytest.mark.parametrize("attention", V2_ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
def test_on_model_runner_v2(ask: Callable[..., Any], target: Any, kind: str, attention: str) -> None:
    pair = target(kind)
    params = [*greedy(2, 14), *seeded(1, 8)]
    run = ask("compare", [9, 33, 60], params, pair=pair, is_async=True, attention=attention)
    assert run["differences"] == [] and run["length"] > 1.4


# All of them in `make test-long`, as far as vLLM can import them here.
PICTURES: list[Any] = ["paddleocr_vl", "idefics3 both ways"]
if os.environ.get("MEDUSA_LONG"):
    PICTURES += [kind for kind in KINDS_WITH_PICTURES if kind.values[0] not in PICTURES]


@pytest.fixture(scope="module")
def takes_pictures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folders of a kind of PICTURES and of heads for it."""

    @cache
    def get(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pictures")
        if kind == "idefics3 both ways":
            return seeing_both_ways(get("idefics3"), folder)
        return save_picture_target(kind, folder)

    return get


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_on_model_runner_v2(ask: Callable[..., Any], takes_pictures: Any, kind: str) -> None:
    """M-RoPE; image tokens that see each other both ways, in prompts that vLLM computes beside trees."""
    run = ask(compare_pictures, pair=takes_pictures(kind))
    assert run["said"] == run["told"] and run["length"] > 1.4
    if kind == "idefics3":
        both_ways = ask(compare_pictures, pair=takes_pictures("idefics3 both ways"))
        assert run["told"] != both_ways["told"], "it matters who sees whom"


FLOAT8_CASES = {"fp8": {"kv_cache_dtype": "fp8"}, "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"}, "scales": {}}


@pytest.fixture(scope="module")
def scaled(target: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint that asks for a float8 cache with scales of its own."""
    model, heads = target("llama")
    folder = tmp_path_factory.mktemp("scaled") / "llama"
    shutil.copytree(model, folder)
    add_cache_scales(folder)
    return folder, heads


@needs_float8
@pytest.mark.parametrize("case", FLOAT8_CASES)
def test_float8_caches_on_model_runner_v1(target: Any, scaled: tuple[Path, Path], case: str) -> None:
    """Plain vLLM reads the same bytes: what was rounded is the same for both."""
    model, heads = scaled if case == "scales" else target("llama")
    plain = started(model, **FLOAT8_CASES[case])
    layer = plain.runner.model.model.layers[1].self_attn.attn
    assert plain.runner.kv_caches[0].dtype == torch.uint8
    assert (layer._k_scale_float, layer._v_scale_float) == pytest.approx((0.125, 0.1) if case == "scales" else (1, 1))
    assert_same(plain, started(model, heads, **FLOAT8_CASES[case]))


@needs_float8
@pytest.mark.parametrize("attention", ["CPU_ATTN", "TRITON_ATTN"])
def test_float8_caches_on_model_runner_v2(ask: Callable[..., Any], scaled: tuple[Path, Path], attention: str) -> None:
    """Of the same attention, since each writer of vLLM rounds in its own way."""
    params, shared = [*greedy(2, 14), *seeded(1, 8)], {"attention": attention}
    run = ask("compare", [9, 33, 60], params, pair=scaled, is_async=True, shared=shared)
    assert run["differences"] == [] and run["length"] > 1.4


def test_steps_are_timed_with_different_tokens(target: Any, tmp_path: Path) -> None:
    """At start-up: the same token everywhere would ask the same few experts, and a wide step would look too cheap."""
    trees = started(*target("qwen3_moe"), medusa={"adaptive": True})
    most: list[int] = []
    embedding = trees.runner.model.model.embed_tokens
    hook = embedding.register_forward_pre_hook(lambda _, given: most.append(len(given[0].unique())))
    trees.runner.measure_step_cost(Kept(tmp_path, {}))
    hook.remove()
    assert max(most) > 32


def test_a_dry_step_knows_no_trees(target: Any) -> None:
    """Between steps: an engine that steps together with others runs one while it has nothing to do."""
    from vllm import SamplingParams

    trees = started(*target("mixtral"))
    trees.runner._draft = Oracle(trees, {}, lambda rng: random_tree(rng, 12))
    trees.runner._draft._answer = lambda _: ()
    engine = trees.llm.llm_engine
    for number, prompt in enumerate(random_prompts(np.random.default_rng(3), [9, 33])):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert trees.runner.trees.is_tree.all()
    with torch.inference_mode():
        trees.runner._dummy_run(13, force_attention=True)
    engine.abort_request(["0", "1"])
