"""What a start measured on this machine, kept for the next one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.compiled import instruction_set, processor


class Kept:
    """Values of JSON by name, in a file that is named by all that they depend on.

    Where the file cannot be read or written nothing is known or kept: it saves time, no more.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> kept = Kept(folder, {"model": "tiny"})
    >>> kept.put("seconds", [0.1, 0.2])
    >>> kept.save()
    >>> Kept(folder, {"model": "tiny"}).get("seconds"), Kept(folder, {"model": "other"}).get("seconds")
    ([0.1, 0.2], None)
    """

    def __init__(self, folder: Path | None, subject: dict[str, Any]) -> None:
        """Read what is kept.

        Args:
            folder: where; None keeps nothing.
            subject: what the values are of, beside this machine, its threads and torch's version.
        """
        machine = [processor(), instruction_set(), torch.get_num_threads(), torch.__version__]
        key = json.dumps([machine, subject], sort_keys=True, default=str)
        name = f"measured_{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
        self._file = folder / name if folder is not None else None
        self._values: dict[str, Any] = {}
        self._changed = False
        if self._file is not None:
            try:
                read = json.loads(self._file.read_text(encoding="utf-8"))
                self._values = read if isinstance(read, dict) else {}
            except (OSError, ValueError):
                pass

    def get(self, name: str) -> Any:
        """The value, or None."""
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        """Set a value; written by `save`."""
        if self._values.get(name) != value:
            self._values[name] = value
            self._changed = True

    def save(self) -> None:
        """Write the file, at once and whole."""
        if self._file is None or not self._changed:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as unfinished:
                json.dump(self._values, unfinished)
            os.replace(unfinished.name, self._file)
            self._changed = False
        except OSError:
            pass
