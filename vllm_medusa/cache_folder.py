"""Where things are kept between runs: compiled code, the demo's model."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path


def user_cache() -> Path:
    """~/.cache; among the temporary files where the user has no home, or one that cannot be written.

    That is so in containers that run under a number without a name: there is no home to look up, or it is "/".
    """
    try:
        folder = Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and nobody has this user id
        return _temporary_cache()
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return folder if os.access(there, os.W_OK | os.X_OK) else _temporary_cache()


@lru_cache(maxsize=1)
def _temporary_cache() -> Path:
    """A folder that only this user can write: what is compiled there is run."""
    folder = Path(tempfile.gettempdir()) / f"vllm-medusa-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    except OSError:
        own = False
    return folder if own else Path(tempfile.mkdtemp(prefix="vllm-medusa-"))
