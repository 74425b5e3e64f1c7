"""All findings, one after the other, and what they come to: the first thing to send with a report of trouble."""

from __future__ import annotations

import json
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vllm_medusa.doctor import installation, machine, product
from vllm_medusa.doctor.finding import Finding
from vllm_medusa.doctor.host_source import check_source
from vllm_medusa.doctor.pair import check_pair
from vllm_medusa.doctor.self_check import SUBJECT, run_self_check
from vllm_medusa.errors import MedusaError
from vllm_medusa.progress import stage

CHECKS: tuple[Callable[[], Finding], ...] = (
    installation.check_versions,
    installation.check_host,
    installation.check_contract,
    installation.check_plugin,
    installation.check_model_runner,
    installation.check_torchvision,
    machine.check_platform,
    machine.check_compiler,
    machine.check_kernel,
    product.check_product,
    machine.check_caches,
    machine.check_threads,
    machine.check_kv_cache,
    machine.check_saved_models,
)
_MARKS = {"ok": ("✔", "green"), "note": ("•", "yellow"), "bad": ("✘", "bold red")}
_WIDTH = 16  # of subjects
_NEEDED = ("vLLM", "host contract", "plugin", "model runner", "torchvision")  # without these nothing is served


@dataclass(frozen=True)
class Questions:
    """What doctor is asked.

    Attributes:
        model, heads: a pair of the user's; None: the defaults.
        self_check: whether to serve a tiny model.
        seconds: after which that is given up.
        host_source: a folder with an unpacked vLLM: only that is looked at.
    """

    model: str | None = None
    heads: str | None = None
    self_check: bool = True
    seconds: float = 120.0
    host_source: Path | None = None


def run_checks(console: Console, questions: Questions, json_file: Path | None = None) -> bool:
    """Print every finding as it comes; True if none is bad. With `json_file` all are written there too.

    Raises:
        MedusaError: a `json_file` that cannot be written, a `host_source` without a vLLM.
    """
    # Before vLLM is imported: what it and we log about the same things are not findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ("vllm", "vllm_medusa"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: list[Finding] = []
    for finding in _findings(console, questions):
        found.append(finding)
        _show(console, finding)
    bad, notes = (sum(finding.state == state for finding in found) for state in ("bad", "note"))
    if json_file is not None:
        content = {"can_serve": bad == 0, "findings": [asdict(finding) for finding in found]}
        try:
            json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise MedusaError.of("json", str(json_file), f"cannot be written ({error.strerror})") from None
    console.print()
    where = "here" if questions.host_source is None else "on this vLLM, as far as its source tells"
    console.print(_summary(bad, notes, where), soft_wrap=True)
    return bad == 0


def _findings(console: Console, questions: Questions) -> Iterator[Finding]:
    if questions.host_source is not None:
        yield from check_source(questions.host_source)
        return
    fit = True
    for check in CHECKS:
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        with stage(console, f"looking at {subject}") if console.is_terminal else nullcontext():
            (done,) = _survive(subject, lambda check=check: [check()])  # type: ignore[misc]
        fit = fit and not (done.state == "bad" and done.subject in _NEEDED)
        yield done
    with stage(console, "reading heads") if console.is_terminal else nullcontext():
        pair = _survive("heads", lambda: check_pair(questions.model, questions.heads))
    yield from pair
    if not questions.self_check:
        yield Finding(SUBJECT, "note", "left out", "without --no-self-check it serves a tiny model with trees")
        return
    if not fit:
        yield Finding(SUBJECT, "note", "left out: it would fail by what is found above", "mend that first")
        return
    asked = (questions.model, questions.heads) if questions.model and questions.heads else (None, None)
    with stage(console, "serving a tiny model, plain and with trees"):
        tried = _survive(SUBJECT, lambda: run_self_check(questions.seconds, *asked))
    yield from tried


def _survive(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 (a check that cannot run is a finding, not the end of the list)
        return [Finding(subject, "bad", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")]


def _show(console: Console, finding: Finding) -> None:
    """A line each for what is there and what to do, wrapped beside the subject on a terminal, else as they are."""
    mark, style = _MARKS[finding.state]
    if not console.encoding.lower().startswith("utf"):
        mark = {"ok": "+", "note": "*", "bad": "!"}[finding.state]
    indent = " " * (_WIDTH + 2)
    width = max(console.width - len(indent), 30) if console.is_terminal else 10**6
    detail = textwrap.wrap(finding.detail, width, break_on_hyphens=False) or [""]
    advice = textwrap.wrap(f"-> {finding.advice}", width, subsequent_indent="   ", break_on_hyphens=False)
    lines = [Text.assemble((mark, style), " ", (f"{finding.subject:<{_WIDTH}}", "bold"), detail[0])]
    lines += [Text(indent + line) for line in detail[1:]]
    lines += [
        Text(indent + line, style="yellow" if finding.state == "note" else "red") for line in advice if finding.advice
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _summary(bad: int, notes: int, where: str) -> Text:
    noted = f"; {notes} {'note' if notes == 1 else 'notes'} to read" if notes else ""
    if bad:
        return Text(
            f"Medusa cannot serve {where}: {bad} {'fault' if bad == 1 else 'faults'} to mend{noted}.", "bold red"
        )
    return Text(f"Medusa can serve {where}{noted}.", "bold green")
