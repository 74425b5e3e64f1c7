"""An engine in a process of its own, whatever way it is spoken to: start it, watch it, stop it, tell why it failed."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from vllm_medusa.bench.memory import peaks_of_session
from vllm_medusa.errors import MedusaError

Progress = Callable[[dict[str, Any]], None]
STOP_SECONDS = 20.0
ABORT_SECONDS = 2.0
CORE_FAILED = "Engine core"  # what vLLM's front end says when the cause was raised in another process


def ignore(message: dict[str, Any]) -> None:
    """The progress callback of those who do not watch."""


class EngineProcess(ABC):
    """One vLLM engine in a child process, `python -m MODULE FD`. Use it as a context manager.

    The child gets JSON commands, one a line, on its standard input and answers with JSON lines on file descriptor FD.
    It ends when its input does, so it never outlives us. vLLM's own output goes to a log file, shown only when
    something fails (`verbose` sends it to our stderr instead).
    """

    module: str  # set by each kind of engine

    def __init__(
        self,
        name: str,
        first: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        export_heads: bool = False,
        verbose: bool = False,
    ) -> None:
        """`first`: the command that says what to start. Returns at once; `wait_until_ready` waits.

        With `export_heads` the command's `export_to` names an empty folder for heads in vLLM's format, which goes when
        we stop; else it is None.
        """
        self.name = name
        self.facts: dict[str, Any] = {}
        self.log = Path(tempfile.mkstemp(prefix=f"vllm-medusa-{name}-", suffix=".log")[1])
        self._failed = False
        self._heads = tempfile.TemporaryDirectory(prefix="vllm-medusa-native-") if export_heads else None
        answers, answers_child = os.pipe()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(answers_child)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr if verbose else log,
                stderr=sys.stderr if verbose else log,
                pass_fds=(answers_child,),
                env=dict(environment),
                start_new_session=True,  # a group of its own, so that stopping it leaves no grandchild behind
                text=True,
            )
        os.close(answers_child)
        self._answers = open(answers, encoding="utf-8")  # noqa: SIM115 (closed by stop)
        self._send({**first, "export_to": self._heads.name if self._heads else None})

    @abstractmethod
    def wait_until_ready(self, progress: Progress = ignore) -> Self:
        """Wait for the engine to be up; raises MedusaError with the cause when it does not come up."""

    @abstractmethod
    def run(
        self, prompts: Sequence[str], *, batch_size: int, sampling: Mapping[str, Any], progress: Progress = ignore
    ) -> dict[str, Any]:
        """Answer the prompts with `batch_size` of them in flight; the fields of `measurement.Measurement`."""

    @abstractmethod
    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """The number of tokens of each prompt, as `run` asks for it."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(STOP_SECONDS if kind is None else ABORT_SECONDS)

    def peak_resident_mib(self) -> dict[str, float]:
        """Each living process of the engine -> the most memory it has held so far, in MiB; empty where unknown."""
        return peaks_of_session(self._process.pid)

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """Ask the engine to end, after `patience` seconds end it, and leave nothing of it. Safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):  # it may be gone already
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # then it is killed
            self._process.wait(timeout=patience)
        with suppress(ProcessLookupError):  # the usual case: the whole group has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        if self._heads is not None:
            self._heads.cleanup()
        if not self._failed:  # a failed engine's log is named in the error
            self.log.unlink(missing_ok=True)

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("its process ended") from None

    def _result(self, progress: Progress) -> Any:
        """The child's next result; what it says before goes to `progress`."""
        for line in self._answers:
            message = json.loads(line)
            if message["event"] == "result":
                return message["value"]
            if message["event"] == "error":
                if message["kind"] == MedusaError.__name__:  # already one readable sentence
                    raise MedusaError(message["message"])
                reason = f"{message['kind']}: {message['message']}"
                raise self._failure(reason, known=CORE_FAILED not in reason)
            progress(message)
        raise self._failure("it ended without a word")

    def _failure(self, reason: str, *, known: bool = False) -> MedusaError:
        """What went wrong: `reason` where that is `known`, else the exception that came first in vLLM's log, if any."""
        self._failed = True
        cause = None if known else root_cause(self.log.read_text(errors="replace"))
        return MedusaError(f"The {self.name!r} engine failed. {cause or reason}\n(vLLM's whole log: {self.log})")


def root_cause(log: str) -> str | None:
    """The exception that brought an engine down, from vLLM's log; None if there is none.

    vLLM prints the traceback of the engine's own process first and then "Engine core initialization failed" from the
    front end, so the first exception line is the cause; what pydantic adds below it is dropped.

    >>> root_cause("(EngineCore pid=7) ERROR 01-01 [core.py:9] ValueError: no memory\\nRuntimeError: failed")
    'ValueError: no memory'
    """
    pattern = re.compile(r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
    found = pattern.search(log)
    return found.group(1).strip() if found else None
