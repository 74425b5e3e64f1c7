"""The few places where vLLM has no seam: each patch beside its reason and the condition for its removal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_medusa.errors import MedusaError
from vllm_medusa.host import choice, engine_args
from vllm_medusa.host.compat import METRICS_CONTRACT, find_problems

_MARK = "_vllm_medusa_original"


def install() -> None:
    """Apply every patch once per process."""
    _patch(EngineArgs, "create_speculative_config", _create_speculative_config)
    _patch(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    _let_figures_through()


def install_refusal(error: Exception) -> None:
    """On a host that we do not know: raise `error` when Medusa is asked for, and change nothing else."""

    def refuse(original: Callable[..., Any], self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if engine_args.asks_for_medusa(self):
            raise error
        return original(self, *args, **kwargs)

    _patch(EngineArgs, "create_speculative_config", refuse)


def uninstall() -> None:
    """Give the host its own methods back."""
    for owner, name in ((EngineArgs, "create_speculative_config"), (SamplingParams, "_validate_spec_decode")):
        current = getattr(owner, name)
        # A wrapper that another plugin laid over ours carries our mark too (functools.wraps): it stays.
        if getattr(current, _MARK, None) is not None and current.__wrapped__ is current.__dict__[_MARK]:
            setattr(owner, name, current.__wrapped__)
    _let_figures_through(False)
    _show_metrics(False)


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(patched, _MARK, original)
    setattr(owner, name, patched)


def _create_speculative_config(original: Callable[..., Any], self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
    """`method: "medusa"`: vLLM 0.33 does not know it and 0.32 means its own single chain by it.

    Remove when vLLM lets plugins register a speculative method.
    """
    if not engine_args.asks_for_medusa(self):
        return original(self, *args, **kwargs)
    _show_metrics()
    return engine_args.create_speculative_config(original, self, *args, **kwargs)


def _validate_spec_decode(original: Callable[..., Any], self: SamplingParams, speculative_config: Any) -> None:
    """min_p and logit_bias: vLLM refuses them with any speculation, since its rejection sampler ignores them.

    Our walk samples through the host's own Sampler with all its processors, so they hold. Remove when vLLM decides by
    method.
    """
    if speculative_config is not None and choice.is_ours(speculative_config):
        return
    original(self, speculative_config)


def _let_figures_through(ours: bool = True) -> None:
    """Figures beside the host's counts of drafts: its decoder fills fields by their declared type, and drops others.

    The declared type becomes ours, which has one field more, with a default. Before a front end builds its decoder,
    since that reads types once. Remove when vLLM's stats carry what a plugin adds.
    """
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from vllm_medusa.host.metrics.stats import MedusaStats

    SchedulerStats.__annotations__["spec_decoding_stats"] = (MedusaStats if ours else SpecDecodingStats) | None


def _show_metrics(ours: bool = True) -> None:
    """Metrics and log line where the host makes its own about drafts; only in processes that ask for Medusa.

    vLLM's entry point for loggers (`vllm.stat_logger_plugins`) is read by async engines alone, and turns the stats on
    where `--disable-log-stats` turned them off. Remove when it serves every engine and leaves that to the user.
    """
    problems = find_problems(METRICS_CONTRACT)
    if problems:
        raise MedusaError("medusa: this vLLM cannot show Medusa's metrics: " + "; ".join(problems))
    from vllm.v1.metrics import loggers
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

    from vllm_medusa.host.metrics.logline import MedusaLogging
    from vllm_medusa.host.metrics.prometheus import MedusaProm

    loggers.SpecDecodingLogging = MedusaLogging if ours else SpecDecodingLogging
    loggers.PrometheusStatLogger._spec_decoding_cls = MedusaProm if ours else SpecDecodingProm
