"""What host/ relies on in vLLM beyond compat.py's contract: its own imports, attributes of live objects, layouts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.host.compat import GPU_CONTRACT, V2_CONTRACT, Symbol, full_contract
from vllm_medusa.host.source import HostSource

_DEVICE = "vllm.v1.worker.gpu"
_GROUP = "vllm.distributed.parallel_state"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_RUNNER, _BATCH = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_input_batch"
# Attributes that exist once an engine is up (the table of docs/host-versions.md).
ATTRIBUTES = (
    Symbol(_RUNNER, "GPUModelRunner.rejection_sampler"),
    Symbol(_RUNNER, "GPUModelRunner.discard_request_mask"),
    Symbol(_RUNNER, "GPUModelRunner.attn_groups"),
    Symbol("vllm.config", "CompilationConfig.static_forward_context"),
    Symbol(_BATCH, "InputBatch.token_ids_cpu"),
    Symbol(_BATCH, "InputBatch.num_tokens_no_spec"),
    Symbol(_BATCH, "InputBatch.logitsprocs_need_output_token_ids"),
    Symbol(_BATCH, "InputBatch._make_sampling_metadata"),
    Symbol(_BATCH, "InputBatch.thinking_budget_state_holder"),
    Symbol("vllm.v1.sample.sampler", "Sampler.topk_topp_sampler"),
    Symbol("vllm.v1.sample.logits_processor", "AdapterLogitsProcessor.req_info"),
    Symbol("vllm.model_executor.layers.attention", "Attention.head_size_v"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.kernel_block_size"),
    Symbol("vllm.model_executor.layers.attention", "Attention.kv_sharing_target_layer_name"),
    Symbol("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadata.slot_mapping"),
    Symbol(_GROUP, "GroupCoordinator.rank_in_group"),
    Symbol(_GROUP, "GroupCoordinator.cpu_group"),
    Symbol(_GROUP, "GroupCoordinator.all_gather"),
    Symbol(_EMBEDDING, "VocabParallelEmbedding.shard_indices"),
    Symbol(_EMBEDDING, "VocabParallelEmbedding.org_vocab_size"),
    Symbol(_EMBEDDING, "VocabParallelEmbedding.tp_size"),
    Symbol(_EMBEDDING, "VocabParallelEmbedding.params_dtype"),
    Symbol(_EMBEDDING, "VocabParallelEmbedding.quant_method"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.dynamic_sd_lookup"),
    Symbol("vllm.v1.core.sched.output", "SchedulerOutput.num_spec_tokens_to_schedule"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.max_num_scheduled_tokens"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.max_num_active_reqs"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.num_waiting_for_streaming_input"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.kv_holding_waiting"),
    Symbol("vllm.v1.request", "Request.num_output_placeholders"),
    Symbol("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers"),
    Symbol("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.req_to_blocks"),
    Symbol("vllm.v1.structured_output", "StructuredOutputManager.grammar_bitmask"),
    Symbol(f"{_DEVICE}.model_runner", "GPUModelRunner.draft_tokens_handler"),
    Symbol(f"{_DEVICE}.model_runner", "GPUModelRunner.speculator"),
    Symbol(f"{_DEVICE}.model_runner", "GPUModelRunner.req_states"),
    Symbol("vllm.config", "ModelConfig.use_fp64_gumbel"),
    Symbol(f"{_DEVICE}.states", "RequestState.all_token_ids"),
    Symbol(f"{_DEVICE}.states", "RequestState.total_len"),
    Symbol(f"{_DEVICE}.sample.sampler", "Sampler.needs_logits_processing"),
    Symbol(f"{_DEVICE}.sample.thinking_budget", "ThinkingBudgetState.use_thinking_budget"),
    Symbol(f"{_DEVICE}.sample.penalties", "PenaltiesState.use_penalty"),
    Symbol(f"{_DEVICE}.sample.bad_words", "BadWordsState.num_bad_words"),
)


@dataclass(frozen=True)
class Layout:
    """How an array is laid out, by the words in which a definition says it."""

    module: str
    name: str
    says: str

    def problem(self, source: HostSource) -> str | None:
        """What is wrong with it in this source, or None."""
        found = source.find(self.module, self.name)
        if found is None or found.node is None:
            return f"{self.module}.{self.name} is gone"
        if self.says not in ast.unparse(found.node):
            return f"{self.module}.{self.name} no longer says `{self.says}`"
        return None


LAYOUTS = (
    # A CPU's block holds first all keys, then all values.
    Layout("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.forward", "kv_cache.chunk(2, dim=2)"),
    # Elsewhere a layer's cache is [blocks, KV heads, block, keys then values of one head].
    Layout("vllm.v1.kv_cache_layout", "KVCacheLayout.LBHNC", "(0, 1, 2, 3, 4)"),
    Layout("vllm.v1.attention.backends.triton_attn", "TritonAttentionImpl.forward", "kv_cache.split(hs, dim=-1)"),
    Layout(
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl.forward",
        "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",
    ),
)


def imported(folder: Path | None = None) -> Iterator[Symbol]:
    """Every name of vLLM that the files of host/ import, with the keywords by which they call it."""
    for file in sorted((folder or Path(__file__).parent).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known: dict[str, list[tuple[str, str]]] = {}  # what a name here may mean: branches import one from two places
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    known.setdefault(alias.asname or alias.name, []).append((str(node.module), alias.name))
        called: dict[str, set[str]] = {name: set() for name in known}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                path = ast.unparse(node.func)
                if path.split(".")[0] in known:
                    called.setdefault(path, set()).update(keyword.arg for keyword in node.keywords if keyword.arg)
        for path, keywords in called.items():
            first, *rest = path.split(".")
            for module, original in known[first]:
                yield Symbol(module, ".".join([original, *rest]), tuple(sorted(keywords)))


def look(source: HostSource) -> tuple[int, list[str]]:
    """How many things were looked for in this source, and what is wrong with them."""
    contract = (*full_contract(), *V2_CONTRACT, *GPU_CONTRACT)
    symbols = list(dict.fromkeys((*contract, *ATTRIBUTES, *imported())))
    problems = [source.problem(symbol) for symbol in symbols] + [layout.problem(source) for layout in LAYOUTS]
    return len(problems), list(dict.fromkeys(problem for problem in problems if problem))
