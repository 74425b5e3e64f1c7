"""How long a text may be for a model."""

from __future__ import annotations


def served_length(model: str, wanted: int) -> int:
    """`wanted` tokens of prompt and answer together, or as many as vLLM serves this model with if these are fewer.

    Args:
        model: a folder or hub id; only its config is read.
        wanted: what is more than enough.
    """
    from vllm.engine.arg_utils import EngineArgs

    return min(wanted, int(EngineArgs(model=model).create_model_config().max_model_len))
