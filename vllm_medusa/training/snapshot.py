"""Where a training run stands, on disk: written whole or not at all, so a kill at any moment costs a minute at most."""

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SECONDS = 60.0


def run_name(*facts: Any) -> str:
    """A short name for everything that decides a run's result: the same facts, the same name. Bytes are hashed."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(fact if isinstance(fact, bytes) else json.dumps(fact, sort_keys=True).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


@dataclass
class Snapshots:
    """One file that always holds the latest complete state of one run.

    Attributes:
        file: where the state lies; absent before the first `keep`.
        seconds: how often `keep` writes; 0: at every call.
    """

    file: Path
    seconds: float = SECONDS
    _last: float = field(default_factory=time.monotonic)

    def due(self) -> bool:
        """Whether enough time has passed for another `keep`."""
        return time.monotonic() - self._last >= self.seconds

    def keep(self, state: dict[str, Any]) -> None:
        """Replace the file by `state`: tensors, numbers and containers of them."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_name(self.file.name + ".partial")
        with partial.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())  # the new name must not reach the disk before the content
        os.replace(partial, self.file)
        self._last = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """The latest state, on the CPU, or None before the first."""
        if not self.file.exists():
            return None
        state: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True)
        return state

    def remove(self) -> None:
        """Forget the run."""
        self.file.unlink(missing_ok=True)
        self.file.with_name(self.file.name + ".partial").unlink(missing_ok=True)
