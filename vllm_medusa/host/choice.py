"""Which of the host's two model runners serves: what the user set, else what the platform is best at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vllm_medusa.errors import MedusaError

Runner = Literal["V1", "V2"]
VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
PROPOSER = "vllm_medusa.proposer.MedusaProposer"
# By what name the host builds a drafter of ours. On V2 it takes one that needs no draft model and no slots of its own,
# and that it schedules asynchronously; our worker puts our drafter in its place, and refuses any other runner.
METHODS: Mapping[Runner, str] = {"V1": "custom_class", "V2": "ngram_gpu"}


def choose_runner(asked: bool | None, *, on_cpu: bool, has_triton: bool) -> Runner:
    """Obey VLLM_USE_V2_MODEL_RUNNER where it is set; else V1 on CPUs, where it is quick, and V2 elsewhere.

    Args:
        asked: what the variable says; None: nothing.
        on_cpu: the host's platform is a CPU.
        has_triton: the host can run Triton kernels, of which V2 is made.

    Raises:
        MedusaError: V2 is asked for, or what the platform is best at, and Triton is missing; or trees need it on a GPU.

    >>> choose_runner(None, on_cpu=True, has_triton=True), choose_runner(None, on_cpu=False, has_triton=True)
    ('V1', 'V2')
    """
    wanted: Runner = "V2" if asked or (asked is None and not on_cpu) else "V1"
    if not on_cpu and not has_triton:
        raise MedusaError.of(VARIABLE, asked, "on a GPU trees need Triton; install it")
    if wanted == "V2" and not has_triton:
        raise MedusaError.of(VARIABLE, "1" if asked else None, "Model Runner V2 needs Triton; install it, or set 0")
    return wanted


def runner_of(speculative_config: Any) -> Runner | None:
    """For which runner a SpeculativeConfig of the host was made by us; None: it is not ours."""
    if getattr(speculative_config, "model", None) != PROPOSER:
        return None
    return next((runner for runner, method in METHODS.items() if speculative_config.method == method), None)


def is_ours(speculative_config: Any) -> bool:
    """Whether a SpeculativeConfig of the host is one that we made."""
    return runner_of(speculative_config) is not None


def check_runner(vllm_config: Any) -> Runner:
    """In the worker, before anything is built: the runner that settings were checked for is the host's choice too.

    Raises:
        MedusaError: the host chose the other one, on which it would draft by itself.
    """
    meant = runner_of(vllm_config.speculative_config)
    chosen: Runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    if meant is not None and meant != chosen:
        why = ""
        if meant == "V2":
            features = ", ".join(vllm_config._get_v2_model_runner_unsupported_features())
            why = f" (its V2 lacks {features})" if features else ""
        raise MedusaError(
            f"medusa: settings were checked for Model Runner {meant}, but vLLM chose {chosen}{why}; "
            f"set {VARIABLE}={'1' if meant == 'V2' else '0'} for all of vLLM's processes, or leave that feature out"
        )
    return chosen


def refuse_on_v2(args: Any) -> None:
    """One error, by the name of the key, for what Model Runner V2 cannot serve with trees yet.

    Args:
        args: the host's engine arguments.
    """
    for key, usual in (
        ("enable_dbo", False),
        ("ubatch_size", 0),
        ("prefill_context_parallel_size", 1),
        ("enable_batch_sharded_sampling", None),
        ("watermark_config", None),
        ("enable_trace_replay", False),
        ("return_sampling_mask", False),
        ("enable_prompt_embeds", False),
    ):
        value = getattr(args, key, usual)
        if value not in (usual, False):
            raise MedusaError.of(key, value, f"not served with Medusa trees on Model Runner V2; leave it at {usual!r}")


def refuse_on_v1(given: Mapping[str, Any], model: Any, *, on_cpu: bool) -> None:
    """One error, by the name of the key, for what Model Runner V1 cannot serve with trees.

    Args:
        given: the user's speculative config.
        model: the host's config of the target.
        on_cpu: the host's platform is a CPU.
    """
    if on_cpu:
        return
    if given.get("draft_sample_method") == "probabilistic":
        fix = f"Model Runner V1 draws candidates on a CPU only; choose 'greedy', or leave {VARIABLE} unset"
        raise MedusaError.of("draft_sample_method", "probabilistic", fix)
    if model.is_mm_prefix_lm and model.is_multimodal_model and not model.multimodal_config.language_model_only:
        fix = f"image tokens that see each other both ways need Model Runner V2; unset {VARIABLE}, or set this to true"
        raise MedusaError.of("language_model_only", False, fix)
