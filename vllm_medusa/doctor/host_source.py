"""A vLLM that is not installed: whether its source has what we rely on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vllm_medusa.doctor.finding import Finding
from vllm_medusa.host.compat import TESTED, version_problem
from vllm_medusa.host.reliance import look
from vllm_medusa.host.source import HostSource


def check_source(folder: Path) -> Iterator[Finding]:
    """The version, then every name, signature and layout; a finding for each that is wrong.

    Raises:
        MedusaError: there is no vLLM in `folder`.
    """
    source = HostSource(folder)
    version = read_version(source.package)
    known = f"tested are {', '.join(TESTED)}"
    if version is None:
        yield Finding("vLLM source", "note", f"{source.package}: it does not say which version it is", known)
    elif problem := version_problem(version):
        found, _, advice = problem.partition("; ")
        yield Finding("vLLM source", "bad", found, advice)
    else:
        yield Finding("vLLM source", "ok" if version in TESTED else "note", f"{version}, in the supported range", known)
    count, problems = look(source)
    for problem in problems:
        yield Finding("host contract", "bad", problem, "docs/host-versions.md tells how to move to another version")
    if not problems:
        yield Finding("host contract", "ok", f"all {count} names, signatures and layouts that we rely on are there")


def read_version(package: Path) -> str | None:
    """The version that an unpacked vLLM states: in its own file, else in the metadata that lies beside it."""
    stated = [
        (package / "_version.py", r"^__version__ = (?:version = )?['\"]([^'\"]+)"),
        *((place, r"^Version: (\S+)") for place in sorted(package.parent.glob("vllm*.dist-info/METADATA"))),
        (package.parent / "PKG-INFO", r"^Version: (\S+)"),
    ]
    for place, pattern in stated:
        if place.is_file() and (match := re.search(pattern, place.read_text(encoding="utf-8"), re.MULTILINE)):
            return match[1]
    return None
