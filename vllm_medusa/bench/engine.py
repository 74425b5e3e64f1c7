"""An engine in a process of its own, seen from the bench: start it, run prompts, stop it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_medusa.errors import MedusaError

Progress = Callable[[dict[str, Any]], None]
STOP_SECONDS = 20.0
ABORT_SECONDS = 2.0
CORE_FAILED = "Engine core"  # what vLLM's front end says when the cause was raised in another process


def _ignore(message: dict[str, Any]) -> None:
    """The progress callback of those who do not watch."""


class Engine:
    """One vLLM engine behind two pipes (`driver.py` is the other end). Use it as a context manager.

    vLLM's own output goes to a log file, shown only when something fails (`verbose` sends it to our stderr instead).
    """

    def __init__(
        self,
        name: str,
        engine: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        export_heads: bool = False,
        verbose: bool = False,
    ) -> None:
        """`engine`: keyword arguments of `vllm.LLM`. Returns at once; `wait_until_ready` waits."""
        self.name = name
        self.facts: dict[str, Any] = {}
        self._log = Path(tempfile.mkstemp(prefix=f"vllm-medusa-{name}-", suffix=".log")[1])
        self._failed = False
        answers, answers_child = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_medusa.bench.driver", str(answers_child)],
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
        self._send({"engine": dict(engine), "export_heads": export_heads})

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(STOP_SECONDS if kind is None else ABORT_SECONDS)

    def wait_until_ready(self, progress: Progress = _ignore) -> "Engine":
        """Wait for the engine to be up; raises MedusaError with the cause when it does not come up."""
        self.facts = self._result(progress)
        return self

    def run(
        self, prompts: Sequence[str], *, batch_size: int, sampling: Mapping[str, Any], progress: Progress = _ignore
    ) -> dict[str, Any]:
        """Answer the prompts; the fields of `driver.Measurement`."""
        self._send({"do": "run", "prompts": list(prompts), "batch_size": batch_size, "sampling": dict(sampling)})
        return dict(self._result(progress))

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        self._send({"do": "decode", "tokens": list(tokens)})
        return list(self._result(_ignore))

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
        if not self._failed:  # a failed engine's log is named in the error
            self._log.unlink(missing_ok=True)

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("its process ended") from None

    def _result(self, progress: Progress) -> Any:
        for line in self._answers:
            message = json.loads(line)
            if message["event"] == "result":
                return message["value"]
            if message["event"] == "error":
                if message["kind"] == MedusaError.__name__:  # already one readable sentence
                    raise MedusaError(message["message"])
                raise self._failure(f"{message['kind']}: {message['message']}")
            progress(message)
        raise self._failure(f"{CORE_FAILED} and front end ended without a word")

    def _failure(self, reason: str) -> MedusaError:
        self._failed = True
        cause = root_cause(self._log.read_text(errors="replace")) if CORE_FAILED in reason else None
        return MedusaError(f"The {self.name!r} engine failed. {cause or reason}\n(vLLM's whole log: {self._log})")


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
