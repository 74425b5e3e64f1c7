"""Every key of vLLM's speculative config, and every engine argument about drafts: it works, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from engines import random_prompts, start
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_medusa.config import SETTINGS_KEY
from vllm_medusa.errors import MedusaError
from vllm_medusa.host.speculative_keys import INTERNAL, REFUSED, SERVED, WIDTHS_BY_BATCH

TABLE = [[1, 2, 6], [3, 16, 2]]
# A value that asks for something of each key that has no effect on Medusa.
ASKED: dict[str, Any] = {
    "enforce_eager": True, "tensor_parallel_size": 2, "quantization": "fp8", "moe_backend": "triton",
    "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8", "max_model_len": 64, "code_revision": "main",
    "index_share_for_mtp_iteration": True, "disable_padded_drafter_batch": True, "disable_eagle_block_drop": True,
    "use_local_argmax_reduction": True, "use_heterogeneous_vocab": True, "prompt_lookup_max": 4,
    "prompt_lookup_min": 2, "parallel_drafting": True, "suffix_decoding_max_tree_depth": 8,
    "suffix_decoding_max_cached_requests": 10, "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.5, "draft_load_config": {"load_format": "dummy"},
    "rejection_sample_method": "block", "synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2.0,
    "enable_adaptive_verification": True, "dspark_draft_topk": 8,
}  # fmt: skip
# Engine arguments that concern drafts, and what becomes of them; those of loading concern heads where vLLM would load
# a draft model by them.
ABOUT_DRAFTS = {
    "speculative_config": "ours", "spec_method": "ours", "spec_model": "ours", "spec_tokens": "ours",
    "per_request_spec_decode_metrics": "vLLM counts what our walk accepts",
    "download_dir": "heads too", "hf_token": "heads too",
}  # fmt: skip
OF_THE_TARGET = {
    "revision", "code_revision", "tokenizer_revision", "load_format", "safetensors_load_strategy",
    "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "model_loader_extra_config",
    "ignore_patterns", "use_tqdm_on_load", "pt_load_map_location", "max_parallel_loading_workers",
}  # fmt: skip
ELSEWHERE = {"specialize_active_lora", "engram_config"}  # only sound like it
_OFFLOADING = re.compile(r"offload")


def test_every_field_of_the_speculative_config_is_in_a_table() -> None:
    known = {field.name for field in fields(SpeculativeConfig)}
    assert known == set(SERVED) | set(REFUSED) | INTERNAL, "vLLM has other keys: say what they do to Medusa"
    assert set(ASKED) == set(REFUSED) and not set(SERVED) & set(REFUSED)


def test_every_engine_argument_about_drafts_is_in_a_table() -> None:
    about = re.compile(r"spec|draft|ngram|lookup|medusa|eagle|hf_token|download|revision|load|safetensors|ignore_pat")
    found = {field.name for field in fields(EngineArgs) if about.search(field.name)}
    found = {name for name in found if not _OFFLOADING.search(name)}
    assert found == set(ABOUT_DRAFTS) | OF_THE_TARGET | ELSEWHERE


Make = Callable[..., Any]


@pytest.fixture
def config(tiny_model: Path, tiny_heads: Path) -> Make:
    """An engine's config with these keys of `speculative_config` and these engine arguments."""

    def make(given: dict[str, Any], **options: Any) -> Any:
        medusa = {"method": "medusa", "model": str(tiny_heads), "num_speculative_tokens": 8, **given}
        args = EngineArgs(model=str(tiny_model), skip_tokenizer_init=True, speculative_config=medusa, **options)
        return args.create_engine_config()

    return make


@pytest.mark.parametrize("key", REFUSED)
def test_what_has_no_effect_is_refused_by_name(config: Make, key: str) -> None:
    with pytest.raises(MedusaError) as caught:
        config({key: ASKED[key]})
    message = str(caught.value)
    assert message.startswith(f"medusa: {key}={ASKED[key]!r}: ") and message.endswith(REFUSED[key])


def test_asking_for_what_is_so_anyway_is_no_mistake(config: Make) -> None:
    usual = {field.name: field.default for field in fields(SpeculativeConfig) if field.name in REFUSED}
    config({**usual, "draft_tensor_parallel_size": 1, "revision": None, WIDTHS_BY_BATCH: None})


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({"draft_tensor_parallel_size": 2}, {}, "draft_tensor_parallel_size=2: heads are on the target's ranks"),
        ({"revision": "v1"}, {}, "revision='v1': a folder has none"),
        ({"revision": 3}, {}, "revision=3: give a branch"),
        ({WIDTHS_BY_BATCH: []}, {}, f"{WIDTHS_BY_BATCH}=[]: "),
        ({WIDTHS_BY_BATCH: 3}, {}, f"{WIDTHS_BY_BATCH}=3: give rows of three"),
        ({WIDTHS_BY_BATCH: [[1, 2]]}, {}, f"{WIDTHS_BY_BATCH}=[[1, 2]]: "),
        ({WIDTHS_BY_BATCH: [[2, 4, 3]]}, {}, "must start at 1"),
        ({WIDTHS_BY_BATCH: [[1, 4, 2.5]]}, {}, "give rows of three"),
        ({WIDTHS_BY_BATCH: [[1, 4, 9]]}, {}, f"nodes in {WIDTHS_BY_BATCH}=9: a tree has 8 nodes at most"),
        ({WIDTHS_BY_BATCH: TABLE, "adaptive": True}, {}, "adaptive=True: "),
        ({WIDTHS_BY_BATCH: TABLE}, {"data_parallel_size": 2}, "vLLM drops it with data parallelism"),
    ],
)
def test_a_wrong_value_is_named(config: Make, given: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(MedusaError, match=re.escape(says)):
        config(given, **options)


def test_heads_come_from_the_hub_as_the_user_says(
    config: Make, tiny_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revision, the folder of downloads and the token; the hub is a stand-in that says what it was asked for."""
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tiny_heads)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config({"model": "lab/heads"})
    config({"model": "lab/heads", "revision": "v2"}, download_dir=str(tmp_path), hf_token="hf_x")
    assert all(options.pop("name") == "lab/heads" and options.pop("allow_patterns") for options in asked)
    assert asked == [{}, {"revision": "v2", "cache_dir": str(tmp_path), "token": "hf_x"}]


def test_the_table_travels(config: Make) -> None:
    settings = config({WIDTHS_BY_BATCH: TABLE}).additional_config[SETTINGS_KEY]
    assert settings["widths"] == TABLE and settings["adaptive"] is False


@pytest.mark.slow
def test_nodes_by_the_number_of_requests(tiny: Any, tiny_model: Path, tiny_heads: Path) -> None:
    """On Model Runner V1: six nodes each for one or two requests, two for more, and none where the table says so."""
    import numpy as np
    from vllm import SamplingParams

    medusa = {"num_speculative_tokens": 8, WIDTHS_BY_BATCH: [[1, 2, 6], [3, 4, 2], [5, 16, 0]]}
    engine = start(tiny_model, tiny_heads, max_model_len=512, block_size=32, medusa=medusa)
    prompts = random_prompts(np.random.default_rng(5), [5, 9, 20, 3, 8, 14])
    seen: dict[int, set[int]] = {}
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler

    def schedule(*args: Any, **kwargs: Any) -> Any:
        plan = type(scheduler).schedule(scheduler, *args, **kwargs)
        if all(count == 1 + len(plan.scheduled_spec_decode_tokens.get(name, ())) for name, count in
               plan.num_scheduled_tokens.items()):  # fmt: skip
            sizes = {len(plan.scheduled_spec_decode_tokens.get(name, ())) for name in plan.num_scheduled_tokens}
            seen.setdefault(len(plan.num_scheduled_tokens), set()).update(sizes)
        return plan

    scheduler.schedule = schedule
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 4 * place, ignore_eos=True) for place in range(6)]
    assert engine.tokens(prompts, params) == tiny.tokens(prompts, params)
    assert seen.pop(6) == {0} and seen.pop(5) == {0}
    # Drafts of the step before, for one request more, may still be there.
    assert {2} <= seen[4] <= {0, 2} and {2} <= seen[3] <= {0, 2}
    assert 6 in seen[2] and 6 in seen[1] and max(seen[1] | seen[2]) == 6
