"""The few places where vLLM has no seam: each patch beside its reason and the condition for its removal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_medusa.host import engine_args

_MARK = "_vllm_medusa_original"


def install() -> None:
    """Apply every patch once per process."""
    _patch(EngineArgs, "create_speculative_config", _create_speculative_config)
    _patch(SamplingParams, "_validate_spec_decode", _validate_spec_decode)


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
        original = getattr(getattr(owner, name), _MARK, None)
        if original is not None:
            setattr(owner, name, original)


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
    return engine_args.create_speculative_config(original, self, *args, **kwargs)


def _validate_spec_decode(original: Callable[..., Any], self: SamplingParams, speculative_config: Any) -> None:
    """min_p and logit_bias: vLLM refuses them with any speculation, since its rejection sampler ignores them.

    Our walk samples through the host's own Sampler with all its processors, so they hold. Remove when vLLM decides by
    method.
    """
    if speculative_config is not None and engine_args.is_ours(speculative_config):
        return
    original(self, speculative_config)
