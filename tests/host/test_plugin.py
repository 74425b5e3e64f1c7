"""The plugin is quiet: it loads by itself, twice without harm, and changes nothing for runs that do not ask for it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import MAX_LEN, random_prompts

from vllm_medusa.host import compat


@pytest.mark.parametrize(
    "version, served",
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1", True),
        ("0.33.0rc1", True),
        ("0.34.0", False),
        ("abc", False),
        (None, False),
    ],
)
def test_version_range(version, served):
    assert (compat.version_problem(version) is None) == served


def test_contract_holds_here():
    assert compat.find_problems(compat.full_contract()) == []


def test_a_missing_symbol_is_named():
    gone = compat.Symbol("vllm.v1.sample.sampler", "Sampler.no_such_method")
    changed = compat.Symbol("vllm.v1.sample.sampler", "Sampler.forward", ("logits", "moon_phase"))
    problems = compat.find_problems((gone, changed, compat.Symbol("vllm.nowhere", "x")))
    assert len(problems) == 3
    assert "no_such_method is gone" in problems[0] and "0.32" in problems[0]
    assert "moon_phase" in problems[1]


def test_register_twice_patches_once():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.host import patches
    from vllm_medusa.plugin import register

    register()
    once = EngineArgs.create_speculative_config
    register()
    assert EngineArgs.create_speculative_config is once
    assert "target_model_config" in inspect.signature(once).parameters
    patches.uninstall()
    assert not hasattr(EngineArgs.create_speculative_config, "_vllm_medusa_original")
    register()


@pytest.mark.slow
def test_an_unknown_host_is_refused_only_when_asked(tiny_model, monkeypatch):
    """In a process of its own, with a version that we do not know."""
    code = f"""
import vllm
vllm.__version__ = "0.99.0"
from vllm.engine.arg_utils import EngineArgs
def config(**speculative):
    args = EngineArgs({str(tiny_model)!r}, skip_tokenizer_init=True, speculative_config=speculative or None)
    return args.create_engine_config()
config()
ngram = config(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
assert ngram.speculative_config.method == "ngram"
try:
    config(method="medusa", model="x")
except Exception as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert "MedusaError medusa: this vLLM cannot run Medusa trees: vLLM 0.99.0 is not supported" in result.stdout, (
        result.stderr[-2000:]
    )


@pytest.mark.slow
def test_other_methods_are_left_alone(tiny_model, tiny, tmp_path):
    """n-gram speculation beside us: vLLM's own classes, vLLM's own refusals, the same tokens as plain.

    In a process of its own: n-gram imports numba, after which vLLM cannot start another engine in the same process.
    """
    from vllm import SamplingParams

    prompts = random_prompts(np.random.default_rng(2), [6, 30, 50])
    code = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from engines import start
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
speculative = {{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
engine = start({str(tiny_model)!r}, max_model_len={MAX_LEN}, block_size=32, speculative_config=speculative)
assert type(engine.runner) is CPUModelRunner and type(engine.runner.rejection_sampler) is RejectionSampler
tokens = engine.tokens({prompts}, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
json.dump(tokens, open({str(tmp_path / "answer.json")!r}, "w"))
try:
    engine.tokens([[5, 6]], SamplingParams(min_p=0.2, max_tokens=3))
except (ValueError, VLLMValidationError) as error:
    assert "min_p" in str(error)
else:
    raise AssertionError("vLLM refuses min_p with its own speculation")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert json.loads((tmp_path / "answer.json").read_text()) == tiny.tokens(prompts, params)


@pytest.mark.slow
def test_plain_engines_keep_their_classes(tiny, tiny_medusa):
    """Even in one process with a Medusa engine."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert type(tiny.runner) is CPUModelRunner
    for layer in tiny.runner.compilation_config.static_forward_context.values():
        assert type(layer.impl) is CPUAttentionBackendImpl
