"""What a run's rows take on disk, said before hours of answering."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm_medusa.training.teacher import TOP

# Beside the row: its place and token; and what the target would have said there, tokens and probabilities.
_INDEX, _TEACHER = 3 * 4, TOP * (4 + 2)


def row_bytes(hidden_size: int, *, has_teacher: bool = True) -> int:
    """Bytes on disk of one answer token.

    >>> row_bytes(576), row_bytes(8192)
    (1260, 16492)
    """
    return 2 * hidden_size + _INDEX + (_TEACHER if has_teacher else 0)


def in_words(folder: Path, tokens: int, hidden_size: int, *, has_teacher: bool) -> str:
    """What so many tokens take in `folder`, and what is free there."""
    each = row_bytes(hidden_size, has_teacher=has_teacher)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, tokens * each
    have = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    said = (
        f"rows of up to {tokens:,} tokens take {needed / 1e9:,.1f} GB in {folder} ({each / 1000:.1f} KB each), "
        f"{min(have, needed) / 1e9:,.1f} GB of them are there; free: {free / 1e9:,.1f} GB"
    )
    if needed - have > free:
        fits = (free + have) // each
        said += f". THAT MAY NOT DO: --max-tokens {fits // 1000 * 1000} does, or another --work folder"
    return said
