"""What each key of vLLM's own speculative config does here: it works, or it is refused by name at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_medusa.config import MedusaConfig
from vllm_medusa.errors import MedusaError

WIDTHS_BY_BATCH = "num_speculative_tokens_per_batch_size"
# Taken: by Medusa's own settings, or as said beside it.
SERVED: Mapping[str, str] = {
    "method": "medusa",
    "model": "the heads",
    "num_speculative_tokens": "most nodes of a tree",
    "draft_sample_method": "how candidates are chosen",
    "revision": "of the heads on the hub",
    "draft_tensor_parallel_size": "the target's, nothing else",
    WIDTHS_BY_BATCH: "nodes by the number of requests",
}
# Filled in by vLLM, not by users.
INTERNAL = frozenset({"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"})
_NO_MODEL = "heads are no model with layers of its own; leave it out"
_LOOKUP = "prompt lookup finds by itself how far a text repeats itself; set prompt_lookup to true or false"
_OTHER = "another method's; leave it out"
_WALK = "tokens are drawn from the target as in plain decoding, there is nothing to reject; leave it out"
# No effect on Medusa, whatever their value: what to do instead.
REFUSED: Mapping[str, str] = {
    "enforce_eager": "heads are never compiled; say it for the engine (--enforce-eager)",
    "tensor_parallel_size": "heads are on the target's ranks; leave it out",
    "quantization": "heads are served in the target's type; leave it out",
    "moe_backend": _NO_MODEL,
    "attention_backend": "heads do not attend; say it for the engine (--attention-backend)",
    "kv_cache_dtype": "heads keep no keys and values; say it for the engine (--kv-cache-dtype)",
    "max_model_len": "heads see one row at a time, of a text of any length; leave it out",
    "code_revision": "heads bring no code; leave it out",
    "index_share_for_mtp_iteration": _OTHER,
    "disable_padded_drafter_batch": "trees are drafted without padding; leave it out",
    "disable_eagle_block_drop": _OTHER,
    "use_local_argmax_reduction": "ranks exchange their best candidates alone anyway; leave it out",
    "use_heterogeneous_vocab": "heads guess the target's tokens; leave it out",
    "prompt_lookup_max": _LOOKUP,
    "prompt_lookup_min": _LOOKUP,
    "parallel_drafting": "all heads guess at once anyway; leave it out",
    "suffix_decoding_max_tree_depth": _OTHER,
    "suffix_decoding_max_cached_requests": _OTHER,
    "suffix_decoding_max_spec_factor": _OTHER,
    "suffix_decoding_min_token_prob": _OTHER,
    "draft_load_config": "heads have a loader of their own, which obeys --download-dir and --hf-token; leave it out",
    "rejection_sample_method": _WALK,
    "synthetic_acceptance_rates": _WALK,
    "synthetic_acceptance_length": _WALK,
    "enable_adaptive_verification": "`adaptive` sizes trees by what pays; leave it out",
    "dspark_draft_topk": _OTHER,
}


def host_keys() -> frozenset[str]:
    """The keys that vLLM's config has for users."""
    return frozenset(field.name for field in fields(SpeculativeConfig)) - INTERNAL


def refuse_without_effect(given: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """One error for the first key that would change nothing. What asks for what is so anyway is no mistake.

    Args:
        given: the user's `speculative_config`, names with underscores.
        tensor_parallel_size: the target's.

    Raises:
        MedusaError: by the name of the key.
    """
    usual = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(SpeculativeConfig)
    }
    for key, value in given.items():
        if key in MedusaConfig.model_fields or key in SERVED or key not in host_keys() or value == usual[key]:
            continue
        raise MedusaError.of(key, value, REFUSED.get(key, "this version of Medusa does not know what it does"))
    ranks = given.get("draft_tensor_parallel_size")
    if ranks not in (None, tensor_parallel_size):
        fix = f"heads are on the target's ranks, of which there are {tensor_parallel_size}; leave it out"
        raise MedusaError.of("draft_tensor_parallel_size", ranks, fix)
    if not isinstance(given.get("revision"), str | None):
        raise MedusaError.of("revision", given["revision"], "give a branch, a tag or a commit of the heads' repository")


def read_widths(given: Mapping[str, Any], data_parallel_size: int) -> list[tuple[int, int, int]] | None:
    """The user's table of nodes by the number of requests: first and last number, nodes. None: there is none.

    Raises:
        MedusaError: no such table, or one that nothing would come of.
    """
    table = given.get(WIDTHS_BY_BATCH)
    if table is None:
        return None
    whole = isinstance(table, list | tuple) and all(
        isinstance(row, list | tuple) and all(type(number) is int for number in row) for row in table
    )
    try:
        ranges = validate_and_normalize_dynamic_sd_schedule(list(table) if whole else None)
    except ValueError as error:
        fix = str(error).rstrip(".") if whole else "give rows of three whole numbers"
        raise MedusaError.of(WIDTHS_BY_BATCH, table, f"{fix}; for example [[1, 4, 16], [5, 256, 4]]") from None
    if given.get("adaptive") is True:
        raise MedusaError.of("adaptive", True, f"{WIDTHS_BY_BATCH} says how many nodes there are; keep one of the two")
    if data_parallel_size > 1:
        fix = "vLLM drops it with data parallelism, where ranks have other numbers of requests; leave it out"
        raise MedusaError.of(WIDTHS_BY_BATCH, table, fix)
    return ranges


def check_widths(ranges: list[tuple[int, int, int]] | None, num_nodes: int) -> None:
    """No more nodes by a table than a tree may have.

    Raises:
        MedusaError: there are.
    """
    most = max((nodes for _, _, nodes in ranges or ()), default=0)
    if most > num_nodes:
        fix = f"a tree has {num_nodes} nodes at most; raise num_speculative_tokens, or lower this"
        raise MedusaError.of(f"nodes in {WIDTHS_BY_BATCH}", most, fix)
