"""Which model runner serves, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_medusa.errors import MedusaError
from vllm_medusa.host.choice import METHODS, PROPOSER, check_runner, choose_runner, is_ours, refuse_on_v1, refuse_on_v2


@pytest.mark.parametrize(
    ("asked", "on_cpu", "chosen"),
    [(None, True, "V1"), (None, False, "V2"), (True, True, "V2"), (False, True, "V1"), (False, False, "V1")],
)
def test_the_variable_is_obeyed_else_the_platform(asked: bool | None, on_cpu: bool, chosen: str) -> None:
    assert choose_runner(asked, on_cpu=on_cpu, has_triton=True) == chosen


def test_v1_draws_candidates_on_a_cpu_only() -> None:
    text = SimpleNamespace(is_mm_prefix_lm=False)
    refuse_on_v1({"draft_sample_method": "probabilistic"}, text, on_cpu=True)
    refuse_on_v1({"draft_sample_method": "greedy"}, text, on_cpu=False)
    with pytest.raises(MedusaError, match=r"draft_sample_method='probabilistic'.*on a CPU only"):
        refuse_on_v1({"draft_sample_method": "probabilistic"}, text, on_cpu=False)


def test_v1_on_a_gpu_cuts_steps_without_ranges_of_pictures() -> None:
    def model(text_alone: bool) -> Any:
        asked = SimpleNamespace(language_model_only=text_alone)
        return SimpleNamespace(is_mm_prefix_lm=True, is_multimodal_model=True, multimodal_config=asked)

    refuse_on_v1({}, model(False), on_cpu=True)
    refuse_on_v1({}, model(True), on_cpu=False)
    with pytest.raises(MedusaError, match=r"language_model_only=False: image tokens .* need Model Runner V2"):
        refuse_on_v1({}, model(False), on_cpu=False)


@pytest.mark.parametrize(
    ("mode", "cuts", "left"),
    [
        ("FULL", True, "PIECEWISE"),
        ("FULL_DECODE_ONLY", False, "NONE"),
        ("FULL_AND_PIECEWISE", True, "PIECEWISE"),
        ("NONE", False, "NONE"),
    ],
)
def test_no_graph_of_v1_holds_attention(mode: str, cuts: bool, left: str) -> None:
    from vllm.config import CUDAGraphMode

    from vllm_medusa.host.gpu_worker import cut_at_attention

    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], splitting_ops_contain_attention=lambda: cuts)
    cut_at_attention(compilation)
    assert compilation.cudagraph_mode == CUDAGraphMode[left]


@pytest.mark.parametrize(("asked", "on_cpu"), [(True, True), (None, False), (False, False)])
def test_v2_needs_triton(asked: bool | None, on_cpu: bool) -> None:
    with pytest.raises(MedusaError, match=r"VLLM_USE_V2_MODEL_RUNNER=.*Triton"):
        choose_runner(asked, on_cpu=on_cpu, has_triton=False)


def config(method: str, *, v2: bool, lacks: tuple[str, ...] = ()) -> Any:
    """What the worker asks of the host's config."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, model=PROPOSER),
        use_v2_model_runner=v2,
        _get_v2_model_runner_unsupported_features=lambda: list(lacks),
    )


def test_the_worker_builds_what_was_checked() -> None:
    assert check_runner(config(METHODS["V1"], v2=False)) == "V1"
    assert check_runner(config(METHODS["V2"], v2=True)) == "V2"


def test_a_mismatch_names_the_variable_and_the_reason() -> None:
    """On V1 vLLM would take our method string for its own n-gram drafter."""
    with pytest.raises(MedusaError, match=r"chose V1 \(its V2 lacks dual batches\).*VLLM_USE_V2_MODEL_RUNNER=1"):
        check_runner(config(METHODS["V2"], v2=False, lacks=("dual batches",)))
    with pytest.raises(MedusaError, match=r"chose V2.*VLLM_USE_V2_MODEL_RUNNER=0"):
        check_runner(config(METHODS["V1"], v2=True))


def test_a_users_own_ngram_is_not_ours() -> None:
    assert not is_ours(SimpleNamespace(method="ngram_gpu", model="ngram_gpu"))
    assert not is_ours(SimpleNamespace(method="eagle", model=PROPOSER))
    assert not is_ours(None)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"enable_dbo": True}, "enable_dbo=True"),
        ({"ubatch_size": 2}, "ubatch_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling=True"),
        ({"watermark_config": {"key": 1}}, "watermark_config="),
        ({"enable_trace_replay": True}, "enable_trace_replay=True"),
        ({"return_sampling_mask": True}, "return_sampling_mask=True"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True"),
    ],
)
def test_v2_refuses_by_name(args: dict[str, Any], named: str) -> None:
    with pytest.raises(MedusaError, match=f"medusa: {named}"):
        refuse_on_v2(SimpleNamespace(**args))


def test_v2_takes_the_usual() -> None:
    from vllm.engine.arg_utils import EngineArgs

    refuse_on_v2(EngineArgs(model="any"))


Ask = Callable[..., tuple[Any, Any]]


@pytest.fixture
def ask_on(tiny_model: Path, tiny_heads: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """On a platform of this kind: the parallel config, and what the host was given to build from."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.host import engine_args

    def ask(**platform: bool) -> tuple[Any, Any]:
        medusa = {"method": "medusa", "model": str(tiny_heads)}
        given = EngineArgs(model=str(tiny_model), skip_tokenizer_init=True, speculative_config=medusa)
        model, parallel = given.create_model_config(), ParallelConfig()
        kinds = {"is_cpu": False, "is_cuda": False, **platform}
        answers = {name: (lambda said=said: said) for name, said in kinds.items()}
        monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(device_name="a device", **answers))
        monkeypatch.setattr(engine_args, "HAS_TRITON", True)
        create = engine_args.create_speculative_config
        return parallel, create(lambda args, *_: dict(args.speculative_config), given, model, parallel)

    return ask


def test_a_gpu_gets_its_worker_and_v2(ask_on: Ask) -> None:
    parallel, built = ask_on(is_cuda=True)
    assert built["method"] == METHODS["V2"] and "num_speculative_tokens_per_batch_size" in built
    worker = resolve_obj_by_qualname(parallel.worker_cls)
    assert issubclass(worker, Worker) and not issubclass(worker, CPUWorker)


def test_a_cpu_gets_its_own(ask_on: Ask) -> None:
    parallel, built = ask_on(is_cpu=True)
    assert built["method"] == METHODS["V1"]
    assert issubclass(resolve_obj_by_qualname(parallel.worker_cls), CPUWorker)


def test_other_platforms_are_refused(ask_on: Ask) -> None:
    with pytest.raises(MedusaError, match="platform 'a device': trees are served on CPUs and NVIDIA GPUs"):
        ask_on()
