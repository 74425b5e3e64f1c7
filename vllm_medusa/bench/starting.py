"""What a vLLM that starts does just now, told from its log."""

from __future__ import annotations

import re
from pathlib import Path

# What stands in the log when something begins, in the order of a start; the last one found is what goes on.
SIGNS: tuple[tuple[str, str], ...] = (
    (r"Starting to load model", "loading the model"),
    (r"Loading weights took", "preparing the weights"),
    (r"Warming up model for the compilation|Compiling a graph|Dynamo bytecode transform", "compiling the model"),
    (r"Warming up done", "measuring what steps cost"),
    (r"init engine \(", "almost there"),
    (r"Starting vLLM (?:API )?server|Application startup", "opening the server"),
)


def what_starts(log: Path) -> str | None:
    """In a few words; None: nothing that we know stands there yet.

    Args:
        log: what the engine's processes have written so far.
    """
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [(matches[-1].start(), words) for sign, words in SIGNS if (matches := list(re.finditer(sign, text)))]
    return max(found)[1] if found else None
