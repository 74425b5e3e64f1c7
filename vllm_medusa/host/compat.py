"""The host we were built against: versions, and every symbol and signature that host/ relies on."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

OLDEST, NEWEST = "0.32", "0.34"  # from OLDEST on, before NEWEST
TESTED = ("0.32.0",)


@dataclass(frozen=True)
class Symbol:
    """A name in the host, with the parameters we pass or override (the host may have more, with defaults)."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """What is wrong with it in the installed host, or None."""
        where = f"{self.module}.{self.name}"
        try:
            found = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{where} is gone"
        if self.parameters:
            missing = [p for p in self.parameters if p not in inspect.signature(found).parameters]  # type: ignore[arg-type]
            if missing:
                return f"{where} no longer takes {', '.join(missing)}"
        return None


# Light ones: looked at in every process when the plugin loads.
CONFIG_CONTRACT = (
    Symbol(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("target_model_config", "target_parallel_config"),
    ),
    Symbol("vllm.sampling_params", "SamplingParams._validate_spec_decode", ("speculative_config",)),
    Symbol("vllm.v1.metrics.stats", "SchedulerStats", ("spec_decoding_stats",)),
    Symbol("vllm.v1.spec_decode.metrics", "SpecDecodingStats.new", ("num_spec_tokens",)),
)
# Looked at in a front end that asks for Medusa.
METRICS_CONTRACT = (
    Symbol("vllm.v1.metrics.loggers", "PrometheusStatLogger._spec_decoding_cls"),
    Symbol("vllm.v1.metrics.loggers", "SpecDecodingLogging.observe", ("spec_decoding_stats",)),
    Symbol("vllm.v1.metrics.loggers", "SpecDecodingLogging.log", ("log_fn",)),
    Symbol("vllm.v1.metrics.loggers", "SpecDecodingLogging.reset"),
    Symbol(
        "vllm.v1.spec_decode.metrics",
        "SpecDecodingProm",
        ("speculative_config", "labelnames", "per_engine_labelvalues"),
    ),
    Symbol("vllm.v1.spec_decode.metrics", "SpecDecodingProm.observe", ("spec_decoding_stats", "engine_idx")),
)

_RUNNER = "vllm.v1.worker.gpu_model_runner"
# Looked at in the worker before it builds its runner: these modules are heavy.
RUNNER_CONTRACT = (
    Symbol(_RUNNER, "GPUModelRunner._prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
    Symbol(
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        ("num_tokens", "num_reqs", "max_query_len", "slot_mappings"),
    ),
    Symbol(_RUNNER, "GPUModelRunner._preprocess", ("scheduler_output", "num_input_tokens")),
    Symbol(_RUNNER, "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
    Symbol(_RUNNER, "GPUModelRunner._bookkeeping_sync", ("scheduler_output", "sampler_output")),
    Symbol(_RUNNER, "GPUModelRunner.propose_draft_token_ids", ("sampled_token_ids", "sample_hidden_states")),
    Symbol(_RUNNER, "GPUModelRunner._input_fits_in_drafter", ("common_attn_metadata",)),
    Symbol(_RUNNER, "GPUModelRunner.execute_model", ("scheduler_output",)),
    Symbol(_RUNNER, "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Symbol(_RUNNER, "GPUModelRunner.initialize_kv_cache", ("kv_cache_config",)),
    Symbol(_RUNNER, "GPUModelRunner._dummy_run", ("num_tokens", "randomize_inputs")),
    Symbol("vllm.v1.core.sched.utils", "check_stop", ("request", "max_model_len")),
    Symbol("vllm.v1.sample.sampler", "Sampler.forward", ("logits", "sampling_metadata")),
    Symbol("vllm.v1.sample.sampler", "Sampler.greedy_sample", ("logits",)),
    Symbol("vllm.v1.sample.rejection_sampler", "RejectionSampler.parse_output", ("output_token_ids", "vocab_size")),
    Symbol(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        ("generators", "output_token_ids", "spec_token_ids", "logitsprocs"),
    ),
    Symbol("vllm.v1.outputs", "LogprobsTensors", ("logprob_token_ids", "logprobs", "selected_token_ranks")),
    Symbol("vllm.v1.sample.logits_processor", "LogitsProcessors"),
    Symbol("vllm.v1.sample.logits_processor", "AdapterLogitsProcessor"),
    Symbol("vllm.v1.sample.logits_processor", "build_logitsprocs", ("vllm_config", "custom_logitsprocs")),
)
_V2 = "vllm.v1.worker.gpu"
# Looked at in a worker that was told to build Model Runner V2.
V2_CONTRACT = (
    Symbol(f"{_V2}.model_runner", "GPUModelRunner.load_model"),
    Symbol(f"{_V2}.model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    Symbol(f"{_V2}.model_runner", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Symbol(f"{_V2}.model_runner", "GPUModelRunner._dummy_run", ("num_tokens", "randomize_inputs")),
    Symbol(f"{_V2}.model_runner", "init_model_state", ("vllm_config", "model", "encoder_cache", "device")),
    Symbol(f"{_V2}.model_runner", "AsyncOutput"),
    Symbol("vllm.v1.worker.cpu.model_runner", "CPUModelRunner"),
    Symbol(f"{_V2}.model_states.interface", "ModelState.add_request", ("req_index", "new_req_data")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.initialize_kv_cache", ("kv_cache_config", "block_tables")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.preprocess_state", ("input_batch", "num_computed_tokens")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.prepare_inputs", ("input_batch", "req_states")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.prepare_attn", ("input_batch", "attn_groups")),
    Symbol(f"{_V2}.attn_utils", "compute_mm_prefix_ranges", ("req_ids", "mm_features", "sliding_window")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.postprocess_state", ("idx_mapping", "num_sampled")),
    Symbol(f"{_V2}.model_states.interface", "ModelState.custom_sampler", ("sampler",)),
    Symbol(
        f"{_V2}.spec_decode.speculator",
        "BaseSpeculator.propose",
        ("last_hidden_states", "last_sampled", "temperature", "seeds", "dummy_run", "num_speculative_tokens"),
    ),
    Symbol(f"{_V2}.spec_decode.utils", "DraftTokensHandler.set_draft_tokens", ("input_batch", "draft_tokens")),
    Symbol(f"{_V2}.spec_decode.rejection_sampler", "get_max_chunk_logits", ("vocab_size",)),
    Symbol(
        f"{_V2}.input_batch",
        "InputBatch",
        ("idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "cu_num_logits", "logits_indices", "positions"),
    ),
    Symbol(f"{_V2}.input_batch", "InputBatch", ("seq_lens_cpu_upper_bound", "has_prefill", "num_tokens", "num_reqs")),
    Symbol(f"{_V2}.input_batch", "InputBatch", ("req_ids", "is_prefilling_np")),
    Symbol(f"{_V2}.input_batch", "get_num_sampled_and_rejected", ("num_sampled", "seq_lens", "cu_num_logits")),
    Symbol(
        f"{_V2}.sample.sampler",
        "Sampler.sample",
        ("logits", "expanded_idx_mapping", "pos", "input_ids", "expanded_local_pos", "return_logprobs"),
    ),
    Symbol(f"{_V2}.sample.sampler", "Sampler.get_logprobs_dims", ("idx_mapping_np",)),
    Symbol(f"{_V2}.sample.logprob", "compute_topk_scores", ("cu_num_logits", "logprob_token_ids_state")),
    Symbol(f"{_V2}.sample.gumbel", "gumbel_noised_argmax"),  # a kernel: its parameters cannot be asked for
    Symbol(f"{_V2}.sample.output", "SamplerOutput", ("sampled_token_ids", "num_sampled", "num_rejected")),
    Symbol(f"{_V2}.sample.penalties", "PenaltiesState"),
    Symbol(f"{_V2}.sample.bad_words", "BadWordsState"),
    Symbol(f"{_V2}.sample.logit_bias", "LogitBiasState"),
)
SCHEDULER_CONTRACT = (
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler._update_after_schedule", ("scheduler_output",)),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids", ("draft_token_ids",)),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids_in_output",
        ("draft_token_ids", "scheduler_output"),
    ),
    Symbol("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    Symbol("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
    Symbol("vllm.v1.request", "Request.num_tokens"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler._update_request_with_output", ("request", "new_token_ids")),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.make_spec_decoding_stats", ("spec_decoding_stats",)),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", ("spec_decoding_stats",)),
    Symbol("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics", ("histogram", "per_step_accepted")),
    Symbol(
        "vllm.v1.structured_output",
        "StructuredOutputManager.grammar_bitmask",
        ("requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
    ),
    Symbol("vllm.v1.structured_output", "StructuredOutputManager._get_constraint_bounds", ("request", "spec_tokens")),
    Symbol("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar.fill_bitmask", ("bitmask",)),
    Symbol("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar.validate_tokens", ("tokens",)),
    Symbol("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar.rollback", ("num_tokens",)),
    Symbol("vllm.v1.outputs", "DraftTokenIds", ("req_ids", "draft_token_ids")),
)
CPU_CONTRACT = (
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker.init_device"),
    Symbol("vllm.v1.worker.cpu_worker", "CPUModelRunner"),
    Symbol(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Symbol(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    Symbol(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata"),
    ),
    Symbol(
        "vllm._custom_ops",
        "cpu_attn_reshape_and_cache",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
    ),
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker.load_model"),
    Symbol("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
)
_ATTENDS = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
# Looked at in the worker of a GPU.
GPU_CONTRACT = (
    Symbol("vllm.v1.worker.gpu_worker", "Worker._make_model_runner"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"),
    Symbol(
        f"{_V2}.attn_utils",
        "build_attn_metadata",
        ("attn_groups", "num_reqs", "num_tokens", "query_start_loc_gpu", "query_start_loc_cpu", "block_tables"),
    ),
    *(
        Symbol(
            f"vllm.v1.attention.backends.{module}", f"{name}.forward", ("layer", "kv_cache", "attn_metadata", "output")
        )
        for module, name in (("flash_attn", "FlashAttentionImpl"), ("triton_attn", "TritonAttentionImpl"))
    ),
    Symbol(f"{_V2}.model_states.interface", "ModelState.get_additional_cg_support"),
)


def host_version() -> str | None:
    """The installed vLLM's version, or None where there is none."""
    try:
        import vllm

        return str(vllm.__version__)
    except ImportError:
        return None


@cache
def grammar_rows_have_fixed_stride() -> bool:
    """Whether the host keeps 1 + num_speculative_tokens mask rows for every request (0.33), or as many as needed."""
    return Version(Version(host_version() or OLDEST).base_version) >= Version("0.33")


def version_problem(version: str | None) -> str | None:
    """Why this host version is not served, or None.

    >>> version_problem("0.32.1+cpu") is None, version_problem("0.31.0")
    (True, 'vLLM 0.31.0 is not supported; install vllm>=0.32,<0.34')
    """
    wanted = f"install vllm>={OLDEST},<{NEWEST}"
    if version is None:
        return f"vLLM is not installed; {wanted}"
    try:
        release = Version(version)
    except InvalidVersion:
        return f"vLLM's version {version!r} is not readable; {wanted}"
    # A development build of the next release counts as that release.
    if Version(OLDEST) <= Version(release.base_version) < Version(NEWEST):
        return None
    return f"vLLM {version} is not supported; {wanted}"


def find_problems(contract: tuple[Symbol, ...] = CONFIG_CONTRACT) -> list[str]:
    """What keeps us from serving on the installed host: its version, or missing symbols. Empty if nothing does."""
    wrong_version = version_problem(host_version())
    if wrong_version:
        return [wrong_version]
    tested = f" (tested with vLLM {', '.join(TESTED)})"
    return [problem + tested for symbol in contract if (problem := symbol.problem())]


@cache
def full_contract() -> tuple[Symbol, ...]:
    """Every symbol that serving on a CPU touches."""
    return CONFIG_CONTRACT + METRICS_CONTRACT + RUNNER_CONTRACT + SCHEDULER_CONTRACT + CPU_CONTRACT
