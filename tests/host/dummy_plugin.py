"""Another general plugin, written without a thought for us: it wraps what we wrap, and counts."""

from __future__ import annotations

import functools
from typing import Any

CALLS: list[Any] = []


def register() -> None:
    """Count how often the host makes a speculative config, and what comes of it."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        CALLS.append(made)
        return made

    EngineArgs.create_speculative_config = counted
