"""A try in a process of its own: a crash there is a finding, and this process stays as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_medusa.doctor.finding import Finding
from vllm_medusa.quota import usable_cores

SUBJECT = "self-check"
_REPORT = "send this report, with what vLLM logs under VLLM_LOGGING_LEVEL=DEBUG, to where you got vllm-medusa"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",  # nothing is fetched for it
    "TOKENIZERS_PARALLELISM": "false",
}


def run_self_check(seconds: float, model: str | None = None, heads: str | None = None) -> Iterator[Finding]:
    """Serve a tiny model plain and with trees, and compare the tokens.

    Args:
        seconds: after which the process is ended.
        model, heads: a pair that vLLM is asked to accept on the way; None: no pair.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-medusa-doctor-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps({"model": model, "heads": heads}))
        began = time.monotonic()
        ended, said = _run_child(folder, seconds)
        answer = folder / "answer.json"
        if not answer.is_file():
            yield _silent(ended, said, seconds)
            return
        found = json.loads(answer.read_text())
    if "refusal" in found:
        yield _pair(found["refusal"])
    yield judge(found, time.monotonic() - began)


def judge(answer: dict[str, Any], seconds: float) -> Finding:
    """What the child's answer means.

    >>> judge({"error": "RuntimeError: no memory"}, 1.0).state
    'bad'
    """
    if "error" in answer:
        return Finding(SUBJECT, "bad", f"the tiny model was not served: {_short(answer['error'])}", _REPORT)
    plain, trees = answer["plain"], answer["trees"]
    for request, (wanted, given) in enumerate(zip(plain, trees, strict=True), start=1):
        if wanted != given:
            place = next((i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), len(given))
            detail = f"trees say other tokens than plain vLLM: request {request}, token {place + 1}"
            return Finding(SUBJECT, "bad", detail, _REPORT)
    accepted = answer["mean_accepted_length"]
    if accepted <= 1.0 or not answer["drafted_nodes"]:
        detail = "the same tokens as plain vLLM, but no drafted token was accepted: trees bring nothing here"
        return Finding(SUBJECT, "bad", detail, _REPORT)
    detail = (
        f"{sum(map(len, plain))} tokens of {len(plain)} requests, the same as plain vLLM's; "
        f"{accepted:.1f} tokens a step, {answer['kernel']} kernel, {seconds:.0f} seconds"
    )
    return Finding(SUBJECT, "ok", detail)


def _run_child(folder: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status (None: it took too long), and the last line of what it said."""
    command = [sys.executable, "-m", "vllm_medusa.doctor.child", str(folder)]
    with open(folder / "log", "w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_threads() | os.environ | _ENVIRONMENT,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended: int | None = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _end(child)
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    return ended, lines[-1] if lines else ""


def _threads() -> dict[str, str]:
    """As many as may run, unless the user says a number."""
    return {"OMP_NUM_THREADS": str(usable_cores())}


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and what it started, which may have outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _silent(ended: int | None, said: str, seconds: float) -> Finding:
    """A child that left no answer."""
    if ended is None:
        detail = f"no answer after {seconds:.0f} seconds"
        return Finding(SUBJECT, "bad", detail, "try again with --seconds 300 on a machine that is less busy")
    if ended < 0:
        name = signal.Signals(-ended).name
        advice = "this processor lacks what a library was built for" if name == "SIGILL" else _REPORT
        return Finding(SUBJECT, "bad", f"its process was ended by {name}: {_short(said)}", advice)
    return Finding(SUBJECT, "bad", f"its process ended with status {ended}: {_short(said)}", _REPORT)


def _pair(refusal: str) -> Finding:
    if refusal:
        return Finding("pair in vLLM", "bad", f"vLLM does not serve it: {_short(refusal)}", "mend what it names")
    return Finding("pair in vLLM", "ok", "vLLM accepts model and heads; their weights were not loaded")


def _short(text: str) -> str:
    """In one line, with its middle left out if it is long: errors say most at their beginning and end."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:250]} ... {line[-145:]}"
