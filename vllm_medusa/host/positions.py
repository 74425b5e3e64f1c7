"""How long a text may be for a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_READ = ("trust_remote_code", "hf_overrides", "hf_config_path", "config_format", "quantization", "tokenizer")


def served_length(model: str, wanted: int, engine: Mapping[str, Any] = MappingProxyType({})) -> int:
    """`wanted` tokens of prompt and answer together, or as many as vLLM serves this model with if these are fewer.

    Args:
        model: a folder or hub id; only its config is read.
        wanted: what is more than enough.
        engine: further engine arguments; those that say how a config is read count.
    """
    from vllm.engine.arg_utils import EngineArgs

    read = {name: engine[name] for name in _READ if name in engine}
    return min(wanted, int(EngineArgs(model=model, **read).create_model_config().max_model_len))
