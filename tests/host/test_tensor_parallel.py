"""Two ranks: the tokens of plain vLLM on two ranks and on one, and the same trees on both ranks at every step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MAX_LEN, SPEAKING, random_prompts, start
from tiny_llama import save_llama, save_random_heads

pytestmark = pytest.mark.slow

REGEX = r"[a-e]{12,20}( and [a-e]{3,9}){2}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, speaker_model: Path) -> Path:
    """A tiny Llama with a tokenizer whose two KV heads two ranks share. Its vocabulary is not a multiple of 64."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("two-ranks")
    tokenizer = AutoTokenizer.from_pretrained(speaker_model)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    assert len(tokenizer) % 64
    save_llama(folder, seed=23, vocab_size=len(tokenizer), max_position_embeddings=MAX_LEN, **ends, **sizes)
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Random heads that read the root, through the model's own unembedding."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    folder = tmp_path_factory.mktemp("two-ranks-heads")
    save_random_heads(folder, num_heads=4, num_layers=1, root_conditioned=True, hidden_size=128, vocab_size=vocab)
    return folder


@pytest.fixture(scope="module")
def vocab(heads: Path) -> int:
    """Tokens of the model."""
    return int(json.loads((heads / "config.json").read_text())["vocab_size"])


SETTINGS: dict[str, Any] = {**SPEAKING, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def medusa(model: Path, heads: Path) -> Iterator[Any]:
    """Trees on two ranks, as many nodes as pay by the clock, in a cache too small for eight requests.

    Engine core and workers have processes of their own, as users have it by default.
    """
    from vllm import LLM, envs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("OMP_NUM_THREADS", "1")  # each rank
        patch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")  # ranks that disagree wait for each other
        envs.disable_envs_cache()  # an engine of another test may have filled it
        llm = LLM(
            str(model),
            tensor_parallel_size=2,
            speculative_config={"method": "medusa", "model": str(heads), "num_speculative_tokens": 12},
            worker_extension_cls="on_each_rank.OnEachRank",
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            num_gpu_blocks_override=18,
            disable_log_stats=False,
            seed=0,
            **SETTINGS,
        )
    llm.collective_rpc("log_steps")
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def prompts(vocab: int) -> list[list[int]]:
    """Eight, of different lengths."""
    return random_prompts(np.random.default_rng(4), [1, 5, 31, 32, 33, 64, 90, 120], vocab)


@pytest.fixture(scope="module")
def params() -> list[Any]:
    """Greedy and seeded ones, two of them under a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 3 + i} if i % 2 else {"temperature": 0} for i in range(8)
    ]
    for row in (2, 3):
        given[row]["structured_outputs"] = StructuredOutputsParams(regex=REGEX)
    return [SamplingParams(max_tokens=60, ignore_eos="structured_outputs" not in one, **one) for one in given]


def answers(llm: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """Tokens of each request."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def truth(model: Path, prompts: Any, params: Any) -> list[list[int]]:
    """What plain vLLM says on two ranks; and on one, since the order of sums does not decide a token of this model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        two = start(model, tensor_parallel_size=2, **SETTINGS)
    on_two = answers(two.llm, prompts, params)
    # The executor alone: the engine's own shutdown would take the process groups of other tests' engines with it.
    two.llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
    assert answers(start(model, **SETTINGS).llm, prompts, params) == on_two
    return on_two


def assert_ranks_agree(llm: Any) -> list[Any]:
    """Both ranks checked, emitted and drafted the same in every step; returns the steps."""
    first, second = llm.collective_rpc("taken_steps")
    assert first and first == second
    return list(first)


def preemptions(llm: Any) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def test_the_same_tokens_from_the_same_trees(medusa, truth, prompts, params):
    assert answers(medusa, prompts, params) == truth
    assert_ranks_agree(medusa)


def test_long_paths_a_grammar_and_preemption(medusa, truth, prompts, params, vocab):
    """Drafts that come true: accepted paths are committed to each rank's part of the cache."""
    assert re.fullmatch(REGEX, medusa.get_tokenizer().decode(truth[2], skip_special_tokens=True))
    before = preemptions(medusa)
    medusa.collective_rpc("draft_what_is_true", args=(prompts, truth, 12, vocab))
    medusa.collective_rpc("medusa_report", kwargs={"reset": True})
    assert answers(medusa, prompts, params) == truth
    medusa.collective_rpc("draft_by_heads")
    assert_ranks_agree(medusa)
    assert preemptions(medusa) > before
    first, second = medusa.collective_rpc("medusa_report")
    assert first["mean_accepted_length"] > 1.5
    assert first["accepted_by_depth"] == second["accepted_by_depth"]


def test_unseeded_requests_draw_alike(medusa, prompts):
    """Ranks draw from generators of their own, which must not part ways."""
    from vllm import SamplingParams

    answers(medusa, prompts, SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True))
    assert_ranks_agree(medusa)


def test_a_rank_whose_clock_tells_nonsense(medusa, truth, prompts, params):
    """Clocks decide how much is drafted: it is the first rank's that counts, for both."""
    medusa.collective_rpc("skew_clock")
    for _ in range(2):
        assert answers(medusa, prompts, params) == truth
        assert_ranks_agree(medusa)
    first, second = medusa.collective_rpc("medusa_report")
    assert first["cost"] == second["cost"] and first["heads_cost"] == second["heads_cost"]
    assert max(row["milliseconds"] for row in first["cost"]) < 60e3
