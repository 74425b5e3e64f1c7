"""`method: "medusa"` as the host understands it: checked at start-up, before any weights load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from vllm_medusa.config import DEFAULT_NODES, SETTINGS_KEY, MedusaConfig, resolve
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import check_heads, read_config
from vllm_medusa.heads.source import locate_heads
from vllm_medusa.host.choice import METHODS, PROPOSER, choose_runner, refuse_on_v1, refuse_on_v2
from vllm_medusa.host.layers import FLOAT8
from vllm_medusa.host.speculative_keys import (
    WIDTHS_BY_BATCH,
    check_widths,
    host_keys,
    read_widths,
    refuse_without_effect,
)
from vllm_medusa.widths import first_ranges

WORKERS = {"cpu": "vllm_medusa.host.worker.MedusaCPUWorker", "cuda": "vllm_medusa.host.gpu_worker.MedusaGPUWorker"}
SCHEDULER = "vllm_medusa.host.scheduler.MedusaScheduler"
_FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}


def asks_for_medusa(args: EngineArgs) -> bool:
    """Whether these engine arguments say `method: "medusa"`, as a dict, as JSON or by flag."""
    given: Any = args.speculative_config or {}
    if not isinstance(given, Mapping):
        # No dict at all: the host's to refuse, but for what can only be meant for us.
        return args.spec_method == "medusa" or (isinstance(given, str) and "medusa" in given)
    return "medusa" in (args.spec_method, given.get("method"))


def create_speculative_config(
    original: Callable[..., Any], args: EngineArgs, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """Check everything the user asked for, choose worker and proposer, and let the host build its config from that.

    Our own settings travel to every worker in `additional_config["medusa"]`. `args` keeps what the user wrote.

    Raises:
        MedusaError: settings, heads or a combination that cannot be served.
    """
    given = _merge_flags(args)
    platform = _platform()
    refuse_without_effect(given, target_parallel_config.tensor_parallel_size)
    _refuse_unsupported(args, target_model_config, target_parallel_config, WORKERS[platform])
    _refuse_sides(args)
    runner = choose_runner(envs.VLLM_USE_V2_MODEL_RUNNER, on_cpu=platform == "cpu", has_triton=HAS_TRITON)
    if runner == "V1":
        refuse_on_v1(given, target_model_config, on_cpu=platform == "cpu")
    else:
        refuse_on_v2(args)
    widths = read_widths(given, target_parallel_config.data_parallel_size)
    if widths is not None:
        given = {**given, "adaptive": False}  # the user has decided
    config, _ = MedusaConfig.parse(given, host_keys())
    folder = locate_heads(config.model, revision=given.get("revision"), cache=args.download_dir, token=args.hf_token)
    heads = read_config(folder)
    check_heads(heads, target_model_config.get_hidden_size(), target_model_config.get_vocab_size())
    calibration = heads.calibration
    sizes = calibration.num_speculative_tokens if calibration is not None else {}
    settings = resolve(
        config,
        str(folder),
        num_heads=heads.num_heads,
        top_k=heads.top_k,
        rank_accuracy=calibration.rank_accuracy if calibration is not None else None,
        default_nodes=sizes.get(platform, DEFAULT_NODES[platform]),
    )
    check_widths(widths, settings.num_speculative_tokens)
    if runner == "V1":  # where vLLM knows no such table from 0.33 on
        settings = settings.model_copy(update={"widths": widths})
    if not isinstance(args.additional_config, Mapping):
        raise MedusaError.of("additional_config", args.additional_config, "give a dict, or leave it out")
    args.additional_config = {**args.additional_config, SETTINGS_KEY: settings.model_dump(mode="json")}
    target_parallel_config.worker_cls = WORKERS[platform]
    args.scheduler_cls = SCHEDULER  # the host reads it after this
    written = {name: getattr(args, name) for name in ("speculative_config", *_FLAGS.values())}
    try:
        for flag in _FLAGS.values():
            setattr(args, flag, None)
        args.speculative_config = {
            "method": METHODS[runner],
            "model": PROPOSER,
            "num_speculative_tokens": settings.num_speculative_tokens,
        }
        if runner == "V2" and (widths is not None or settings.adaptive):
            args.speculative_config[WIDTHS_BY_BATCH] = widths or first_ranges(settings.num_speculative_tokens)
        return original(args, target_model_config, target_parallel_config)
    finally:
        for name, value in written.items():
            setattr(args, name, value)


def _merge_flags(args: EngineArgs) -> dict[str, Any]:
    written: Any = args.speculative_config or {}
    if not isinstance(written, Mapping):
        fix = 'give a dict such as {"method": "medusa", "model": "HEADS"}'
        raise MedusaError.of("speculative_config", written, fix)
    given: dict[str, Any] = {}
    for name, value in written.items():
        key = str(name).replace("-", "_")
        if key in given:
            raise MedusaError.of(key, value, "given twice, with - and with _; keep one of the two")
        given[key] = value
    for key, flag in _FLAGS.items():
        value = getattr(args, flag)
        if value is None:
            continue
        if key in given:
            option = "--" + flag.replace("_", "-")
            raise MedusaError.of(key, given[key], f"also given by {option}; keep one of the two")
        given[key] = value
    return given


def _platform() -> Literal["cpu", "cuda"]:
    """Where the host runs.

    Raises:
        MedusaError: neither on a CPU nor on an NVIDIA GPU.
    """
    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    name = current_platform.device_name
    raise MedusaError(f"medusa: platform {name!r}: trees are served on CPUs and NVIDIA GPUs; serve without Medusa here")


def _refuse_unsupported(args: EngineArgs, model: Any, parallel: Any, worker: str) -> None:
    """One error, by the name of the flag, for each combination that would give wrong tokens or none."""
    for key, value, usual in (
        ("worker_cls", parallel.worker_cls, ("auto", worker)),
        ("scheduler_cls", args.scheduler_cls, (None, SCHEDULER)),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, (1,)),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, (1,)),
        ("enable_dbo", parallel.enable_dbo, (False,)),
        ("ubatch_size", parallel.ubatch_size, (0,)),
        ("kv_cache_dtype", resolve_kv_cache_dtype_string(args.kv_cache_dtype, model), ("auto", *FLOAT8)),
        ("kv_transfer_config", args.kv_transfer_config, (None,)),
        ("kv_offloading_size", args.kv_offloading_size, (None,)),
        ("enable_prompt_embeds", model.enable_prompt_embeds, (False,)),
        ("runner", model.runner_type, ("generate",)),
    ):
        if value not in usual:
            raise MedusaError.of(key, value, f"not served with Medusa trees; leave it at {usual[0]!r}")
    if parallel.distributed_executor_backend == "external_launcher":
        fix = "it gives every rank a scheduler of its own, which would plan by its own clock; choose 'mp' or 'ray'"
        raise MedusaError.of("distributed_executor_backend", "external_launcher", fix)
    for what, present in (
        ("an encoder and a decoder", model.is_encoder_decoder),
        ("multi-head latent attention (MLA)", model.use_mla),
        ("recurrent layers", model.is_hybrid or model.is_attention_free or model.has_inner_state),
        ("attention in chunks", model.attention_chunk_size is not None),
        ("attention by distance (ALiBi)", model.uses_alibi),
        ("windows that leave prompts in sight (R-SWA)", model.rswa_window is not None),
    ):
        if present:
            raise MedusaError.of(
                "model", model.model, f"a model with {what} cannot check trees; serve it without Medusa"
            )


def _refuse_sides(args: EngineArgs) -> None:
    """What beside the tokens takes the rows of a request for a sequence."""
    if args.kv_sharing_fast_prefill:
        fix = "it gives shared layers metadata of rows alone, as if drafts were one sequence; leave it at False"
        raise MedusaError.of("kv_sharing_fast_prefill", True, fix)
    if args.aux_output_config.enable_return_routed_experts:
        fix = "vLLM notes experts by the row of a draft, not by the path that is accepted; leave it at False"
        raise MedusaError.of("enable_return_routed_experts", True, fix)
