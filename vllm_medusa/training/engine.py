"""The target in vLLM for training: with our recording worker, or with heads to see what they bring."""

import os
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console

from vllm_medusa.progress import stage
from vllm_medusa.quota import usable_cores

RECORDER = "vllm_medusa.host.recording.RecordingWorker"
OWNED = "vllm_medusa.host.owned.Owned"


class Engine:
    """vLLM's LLM: started by the first use, stopped on exit, and ended with this process however that ends."""

    def __init__(self, doing: str, console: Console | None = None, **arguments: Any) -> None:
        """Start nothing yet.

        Args:
            doing: what starts, for people to read.
            console: where that is told; None: nowhere.
            arguments: of vLLM's LLM.
        """
        self._doing, self._console, self._arguments = doing, console or Console(quiet=True), arguments
        self._llm: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()  # its memory is wanted for what comes next
            self._llm = None

    @property
    def llm(self) -> Any:
        """vLLM's LLM; the first use starts it, a minute or two."""
        if self._llm is None:
            # Settings vLLM reads from the environment only. The user's own values win.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
            with stage(self._console, self._doing):
                self._llm = _start(self._arguments)
            self._llm.collective_rpc("end_with", args=(os.getpid(),))
        return self._llm


def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm import LLM

    return LLM(worker_extension_cls=OWNED, **arguments)
