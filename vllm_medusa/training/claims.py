"""Who makes what, where several processes fill one folder: on one machine, or on many that share it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class Claim:
    """The right to make one thing, held until it is given back or its holder dies: the system takes it back then.

    A POSIX lock on a file of its own (they work across machines on shared file systems that do locking, NFS too), so a
    claim is never stale. Between threads of one process it does not decide.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "shard-0000.lock"
    >>> with Claim(file) as claim:
    ...     claim.wait()
    """

    def __init__(self, file: Path) -> None:
        """`file`: made if it is not there, and left there."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def take(self) -> bool:
        """Claim it, unless another process holds it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def wait(self) -> None:
        """Claim it, once nobody else holds it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
