"""Model Runner V2 gives the tokens of plain decoding: on a tiny Llama in float32, by Triton's interpreter.

Everything runs in a child process (interpreter.py), where engines are shared; the reference is plain vLLM on the same
runner.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_engines import NODES, PROMISE, any_tree
from device_runs import greedy, seeded, static

from vllm_medusa.config import typical_rank_accuracy
from vllm_medusa.tree.lookup import FIRST_ODDS
from vllm_medusa.trust import DOUBT

pytestmark = pytest.mark.slow  # engines start
Ask = Callable[..., Any]
LENGTHS = [1, 9, 33, 60]
LONG = bool(os.environ.get("MEDUSA_LONG"))
IN_BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
# Planned ahead is the harder one; `make test-long` has both.
MOSTLY_ASYNC = pytest.mark.parametrize("is_async", [False, True] if LONG else [True], ids=str)


@IN_BOTH
def test_greedy(ask: Ask, is_async: bool) -> None:
    """Another topology for each request and step; every hidden row is that of the last accepted node."""
    run = ask("compare", LENGTHS, greedy(), is_async=is_async)
    assert run["differences"] == []
    assert run["length"] > 1.7 and run["checked"] > 20 and run["below_root"] > 10
    report = run["report"]
    by_luck, planted, *_ = report["accepted_by_rank"]
    assert planted > 10 * by_luck
    promised = DOUBT + PROMISE * sum(report["drafted_by_rank"])
    assert report["trust"] == pytest.approx((DOUBT + planted + by_luck) / promised, abs=1e-3)


@pytest.mark.parametrize("fault", ["no_commit", "flat_positions"])
def test_these_faults_show(ask: Ask, fault: str) -> None:
    assert ask("compare", LENGTHS, greedy(4, 14), change=fault)["differences"]


@IN_BOTH
def test_seeds_and_log_probabilities(ask: Ask, is_async: bool) -> None:
    params = seeded(4, 10, logprobs=2)
    params[3] = {"temperature": 0, "max_tokens": 10, "logprobs": 0}
    run = ask("compare", LENGTHS, params, is_async=is_async)
    assert run["differences"] == [] and run["length"] > 1.5


@IN_BOTH
def test_limits_pieces_and_preemption(ask: Ask, is_async: bool) -> None:
    """Trees cut to a prefix at max_model_len, prompts in pieces of a budget, a cache too small for the batch; once with
    the same tree each time."""
    limits = {"max_model_len": 64, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 6}
    lengths = [30, 24, 29, 52] if LONG else [30, 24, 52]
    shape = any_tree if is_async else static
    run = ask("compare", lengths, greedy(len(lengths), 80), shape=shape, is_async=is_async, **limits)
    assert run["differences"] == [] and run["preempted"]


@MOSTLY_ASYNC
def test_slots_are_used_again(ask: Ask, is_async: bool) -> None:
    """Ten requests over three slots and a token budget that cuts trees, greedy and sampled ones."""
    params = [request for pair in zip(greedy(5, 6), seeded(5, 6), strict=True) for request in pair]
    lengths = [1, 2, 90, 31, 17, 64, 5, 33, 48, 1]
    run = ask("compare", lengths, params, is_async=is_async, max_num_seqs=3, max_num_batched_tokens=48)
    assert run["differences"] == []


def test_drafts_that_only_fill_places(ask: Ask) -> None:
    """A prompt of one token beside running requests gets as many drafts of nothing as a tree has nodes."""
    run = ask("compare", [9, 1, 33, 1], greedy(), change="padded", max_num_batched_tokens=48)
    assert run["differences"] == []


@pytest.mark.parametrize("change", ["", "small_parts"] if LONG else ["small_parts"])
def test_each_path_is_a_history(ask: Ask, change: str) -> None:
    """Penalties count the tokens of a node's own path; in parts, as large batches are."""
    params = seeded(3, 8, repetition_penalty=1.5, frequency_penalty=1.5, presence_penalty=0.5)
    params[0] = {"temperature": 0, "frequency_penalty": 2.0, "max_tokens": 12}
    params[1] = {"temperature": 0, "max_tokens": 8}
    run = ask("compare", [1, 33, 9], params, change=change)
    assert run["differences"] == [] and run["length"] > 1.4


def test_a_missing_history_shows(ask: Ask) -> None:
    params = [{"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 2.0, "max_tokens": 20}] * 3
    assert ask("compare", LENGTHS[1:], params, change="no_history")["differences"]


def test_forbidden_words_and_least_lengths(ask: Ask) -> None:
    plain = ask("said", LENGTHS, greedy(4, 10))
    params: list[dict[str, Any]] = [{"temperature": 0, "max_tokens": 8} for _ in plain]
    params[0]["bad"] = [plain[0][3:5], plain[0][5:6], [plain[0][7], plain[0][2]]]
    params[1] |= {"temperature": 0.8, "seed": 5, "min_p": 0.01}
    params[2] |= {"min_tokens": 5, "stop_token_ids": plain[2][:6]}
    params[3] |= {"allowed_token_ids": list(range(0, 160, 2)), "logit_bias": {4: 2.0}}
    run = ask("compare", LENGTHS, params, is_async=True)
    assert run["differences"] == [] and run["plain"][0] != plain[0] and run["length"] > 1.3


def test_a_processor_of_the_users_own(ask: Ask) -> None:
    run = ask("compare", [9, 33], seeded(2, 7), shared={"logits_processors": ["device_processor:NoEcho"]})
    assert run["differences"] == [] and run["length"] > 1.3


def test_processed_log_probabilities(ask: Ask) -> None:
    """Of the rows on the path; a greedy batch shows them as they are."""
    shared = {"logprobs_mode": "processed_logprobs"}
    for params in (seeded(2, 6, logprobs=2), [{"temperature": 0, "max_tokens": 6, "logprobs": 1}] * 2):
        assert ask("compare", [9, 33], params, shared=shared)["differences"] == []


def test_drafts_without_a_mask_are_not_accepted(ask: Ask) -> None:
    """vLLM says of which drafts it could not tell what its grammars allow."""
    run = ask("compare", LENGTHS[1:], greedy(3, 5), change="no_masks")
    assert run["differences"] == [] and run["length"] == 1.0


def test_the_prefix_cache_holds_what_was_committed(ask: Ask) -> None:
    wrong, cached = ask("prefix_cache", is_async=True)
    assert wrong == [] and cached == [32, 64]


def test_heads_draft_on_the_device(ask: Ask) -> None:
    """Real (random) heads; figures are counted on the device and read when asked for."""
    run = ask("compare", LENGTHS, greedy(4, 9), shape=None)
    report = run["report"]
    assert run["differences"] == []
    assert report["drafted_nodes"] == sum(report["drafted_by_rank"]) > 0
    assert report["emitted_tokens"] == report["request_steps"] + sum(report["accepted_by_depth"])
    assert sum(report["accepted_by_rank"]) == sum(report["accepted_by_depth"])
    step = report["seconds"].pop("step")
    assert min(report["seconds"].values()) > 0 and sum(report["seconds"].values()) < step
    assert report["trust"] < 1 and 0 < report["overhead_share"] < 1


def test_texts_are_looked_up(ask: Ask) -> None:
    """Prompts that say one thing three times, answers of three tokens that do the same; the heads guess at random."""
    some = {"max_tokens": 24, "logit_bias": {7: 40.0, 8: 40.0, 9: 40.0}}
    params = [{"temperature": 0, **some}, {"temperature": 0.8, "seed": 3, **some}]
    run = ask("compare", [9, 20], params, shape=None, repeats=3, is_async=True)
    report = run["report"]
    assert run["differences"] == []
    *by_heads, by_texts = report["accepted_by_rank"]
    assert len(by_heads) == report["candidates"]
    assert by_texts > 0.2 * report["emitted_tokens"] and by_texts > sum(by_heads)
    assert sum(report["accepted_by_depth"][4:]) > 0, "deeper than there are heads"
    assert report["lookup_odds"] != list(FIRST_ODDS), "what came true is learnt"


def test_the_noise_is_the_samplers(ask: Ask) -> None:
    """What the heads' logits become, the host's sampler takes the largest of: of all tokens, and of a few."""
    assert ask("noise", pair=()) == []


def test_candidates_are_drawn_by_the_targets_noise(ask: Ask) -> None:
    """Heads that know which 32 tokens are asked for, and nothing else, would bring 1.15 tokens a step by the likeliest
    of these. Tokens under a seed are plain decoding's."""
    some = {"max_tokens": 14, "logit_bias": dict.fromkeys(range(20, 52), 60.0)}
    params = [{"temperature": 2.0, "seed": 3, **some}, {"temperature": 1.5, "seed": 8, "top_p": 0.9, **some}]
    medusa = {"draft_sample_method": "probabilistic", "prompt_lookup": False}
    run = ask("compare", [9, 20], params, shape=None, medusa=medusa, change="flat_heads", is_async=True)
    assert run["differences"] == [] and run["length"] > 1.4
    assert run["report"]["accepted_by_depth"][1] > 0, "each head draws by the noise of its own place"


@pytest.mark.parametrize(("tree", "candidates"), [("dynamic", "probabilistic"), ("chain", "greedy")])
def test_nothing_waits_for_the_device(ask: Ask, tree: str, candidates: str) -> None:
    """In draft, walk and what leads to the commit: no value of a tensor decides on the host."""
    params = [*greedy(1, 5), *seeded(1, 5, frequency_penalty=0.5, logprobs=1)]
    medusa = {"tree": tree, "draft_sample_method": candidates}
    run = ask("compare", [9, 33], params, shape=None, change="watched", medusa=medusa, is_async=True)
    assert run["differences"] == []
    run = ask("compare", [9, 33], greedy(2, 5), shape=None, change="watched", medusa=medusa, is_async=True)
    assert run["differences"] == []


def test_width_by_the_number_of_requests(ask: Ask) -> None:
    """The host's own key, down to no nodes at all, while a batch shrinks."""
    table = [(1, 2, NODES), (3, 4, 3), (5, 16, 0)]
    params = [{"temperature": 0, "max_tokens": tokens} for tokens in (6, 8, 10, 16, 20, 24)]
    medusa = {"num_speculative_tokens_per_batch_size": table}
    run = ask("compare", [4, 5, 9, 33, 60, 7], params, medusa=medusa, is_async=True)
    assert run["differences"] == [] and run["widths"] == (None, [0, 8, 8, 3, 3, *[0] * 12])
    assert run["length"] > 1.2


def test_reports_of_times_in_which_no_tree_was_checked(ask: Ask) -> None:
    """A table that says so; what a server shows in its metrics and its log of a period without a walk."""
    medusa = {"num_speculative_tokens_per_batch_size": [(1, 1, NODES), (2, 16, 0)]}
    run = ask("compare", [4, 9, 33], greedy(3, 12), medusa=medusa, is_async=True)
    assert run["differences"] == []
    shown, line = ask("told", medusa=medusa, is_async=True)
    assert shown["forward"] > 0 and shown["walk"] == 0 and sum(shown.values()) > 0
    assert "Drafted: 0 nodes" in line and "walk 0.0%" in line


@IN_BOTH
def test_what_lies_behind_an_end_is_not_counted(ask: Ask, is_async: bool) -> None:
    """Paths that go on behind a stop token and behind limits, and steps that were planned in vain."""
    run = ask("counted", is_async=is_async)
    report, (first, *_) = run["report"], run["got"]
    assert run["got"] == run["expected"] and first > 4
    assert report["emitted_tokens"] == sum(run["got"]) - len(run["got"])
    assert report["request_steps"] == run["steps"]
    assert sum(report["accepted_by_depth"]) == run["accepted"] < sum(report["accepted_by_rank"])
    assert run["least"] >= 0


@IN_BOTH
def test_sessions_go_on(ask: Ask, is_async: bool) -> None:
    """After a turn that ended inside an accepted path, whatever its length and that of the next one."""
    pace = 1 if is_async or LONG else 3
    run = ask("sessions", list(range(2, 9, pace)), list(range(1, 9, pace)), is_async=is_async)
    assert run["differences"] == [] and run["length"] > 1.5


def test_not_a_number_is_told_of_the_request_that_met_it(ask: Ask) -> None:
    """`VLLM_COMPUTE_NANS_IN_LOGITS`: of the rows on its path, and of nobody else's."""
    assert ask("nans") == {"first": 0, "second": 3, "third": 0}


def test_width_by_what_steps_cost(ask: Ask) -> None:
    """Measured at start-up; the scheduler knows from the second step on."""
    run = ask("compare", LENGTHS, greedy(4, 12), medusa={"adaptive": True})
    measured, used = run["widths"]
    assert run["differences"] == [] and measured == used and len(measured) == 17
    assert set(measured) <= {0, 2, 4, 8} and run["report"]["widths"] == measured
    assert run["reach"][0] != pytest.approx(typical_rank_accuracy(4, 10)[0][0], rel=1e-3), "learnt while serving"


@IN_BOTH
def test_grammars(ask: Ask, speaker_model: Path, speaker_heads: Path, is_async: bool) -> None:
    kinds = ["regex", "json", None, "choice"]
    run = ask("grammar", kinds, is_async=is_async, pair=(speaker_model, speaker_heads))
    assert run["differences"] == [] and run["length"] > 1.5


@MOSTLY_ASYNC
def test_thinking_first_then_the_grammar(ask: Ask, speaker_model: Path, speaker_heads: Path, is_async: bool) -> None:
    """Only the host knows where on a path the grammar begins."""
    shared = {"structured_outputs_config": {"reasoning_parser": "deepseek_r1"}}
    sampled = {"temperature": 1.0, "seed": 4, "ends_thoughts": 9.0, "max_tokens": 14}
    pair, kinds = (speaker_model, speaker_heads), ["regex", "json", "choice"]
    run = ask("grammar", kinds, is_async=is_async, shared=shared, pair=pair, **sampled)
    assert run["differences"] == [] and run["length"] > 1.2
    assert len([place for place in run["thought"] if place]) >= 2, "some must think first, and then speak"


def test_a_thinking_budget_is_kept(ask: Ask, speaker_model: Path, speaker_heads: Path) -> None:
    """Counted along each path."""
    reasoning = {"reasoning_parser": "deepseek_r1", "reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    shared, budgets = {"reasoning_config": reasoning}, [None, 3, 6]
    pair = (speaker_model, speaker_heads)
    asked = {"budgets": budgets, "ignore_eos": True, "max_tokens": 10}
    run = ask("grammar", [None] * 3, is_async=True, shared=shared, pair=pair, **asked)
    assert run["differences"] == [] and run["length"] > 1.3
    assert run["thought"][1] <= 4 and run["thought"][2] <= 7


def drawn(rng: np.random.Generator) -> dict[str, Any]:
    """What one request asks for."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": int(rng.integers(1, 14))}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": int(rng.integers(99))},
        {"temperature": 1.0, "seed": 1, "top_p": 0.8, "min_p": 0.02},
        {"logprobs": int(rng.integers(3))},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"bad": [rng.integers(2, 150, 1).tolist() for _ in range(9)]},
        {"min_tokens": 3, "stop_token_ids": rng.integers(0, 160, 40).tolist(), "max_tokens": 9},
        {"allowed_token_ids": rng.integers(2, 159, 60).tolist()},
        {"logit_bias": {int(token): 4.0 for token in rng.integers(2, 159, 4)}},
    ]
    for more in rng.permutation(len(choices))[: rng.integers(0, 4)]:
        asked |= choices[more]
    return asked


@pytest.mark.parametrize("seed", range(60) if LONG else [1])
def test_random_batches(ask: Ask, seed: int) -> None:
    """Whatever requests share a batch, in little room: a few slots, a small budget, a small cache."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    lengths = rng.integers(1, 80, count).tolist()
    room = {"max_num_seqs": 4, "max_num_batched_tokens": 56, "num_gpu_blocks_override": 12, "max_model_len": 96}
    run = ask("compare", lengths, [drawn(rng) for _ in range(count)], is_async=seed % 2 == 1, **room)
    assert run["differences"] == []


@MOSTLY_ASYNC
def test_rows_are_recorded_without_waiting_for_tokens(ask: Ask, tmp_path: Path, is_async: bool) -> None:
    """For training (V1: tests/training/test_recording.py): prompts in pieces, preemption, answers that end early."""
    room = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 7, "max_model_len": 192}
    run = ask("record", tmp_path, is_async, **room)
    assert run["v2"] and run["answers"] == 7 and run["preempted"]
    assert run["right"] > 0.97, "rounded to bfloat16, the second best may come out ahead"
    assert run["said"] < 1e-3


def test_the_host_has_what_we_use(ask: Ask) -> None:
    assert ask("contract", pair=()) == []


@pytest.mark.parametrize(("checked", "found"), [("0", "1"), ("1", "0")])
def test_settings_for_the_other_runner_are_refused(ask: Ask, checked: str, found: str) -> None:
    """Our method for V1 on V2, and the other way round, where vLLM would draft by itself: by the worker."""
    message = ask("mismatch", checked, found)
    meant, chosen = ("V1", "V2") if checked == "0" else ("V2", "V1")
    assert f"checked for Model Runner {meant}, but vLLM chose {chosen}" in message
    assert f"VLLM_USE_V2_MODEL_RUNNER={checked}" in message


def test_what_is_refused(ask: Ask) -> None:
    """By name, before any weights load."""
    cases: dict[str, dict[str, Any]] = {
        "return_sampling_mask=True": {"return_sampling_mask": True},
        "enable_trace_replay=True": {"enable_trace_replay": True},
    }
    for named, message in zip(cases, ask("refusals", list(cases.values())), strict=True):
        assert f"medusa: {named}" in message
