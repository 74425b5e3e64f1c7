"""What is installed here and whether Medusa can serve on it: the first thing to send with a report of trouble."""

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import vllm_medusa
from vllm_medusa.defaults import bundled_heads
from vllm_medusa.errors import MedusaError

OK, NOTE, BAD = "ok", "note", "bad"
MARKS = {OK: "[green]✔[/]", NOTE: "[yellow]•[/]", BAD: "[red]✘[/]"}
GROUP, NAME = "vllm.general_plugins", "medusa"


@dataclass(frozen=True)
class Check:
    """One finding: `state` is "ok", "note" (works, but worth knowing) or "bad" (Medusa cannot serve)."""

    subject: str
    state: str
    detail: str


def run_checks(console: Console, json_file: Path | None = None) -> bool:
    """Print every check; True if none is bad. With `json_file` the findings are written there too."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported: its notices are not findings
    findings = []
    for check in CHECKS:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 (a check that cannot run is a finding, not the end of the list)
            found = Check(check.__name__.lstrip("_"), BAD, f"{type(error).__name__}: {error}")
        findings.append(found)
        line = f"{MARKS[found.state]} [bold]{found.subject}[/]: {escape(found.detail)}"
        console.print(line, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(found) for found in findings], indent=2) + "\n", encoding="utf-8")
    return all(found.state != BAD for found in findings)


def _versions() -> Check:
    detail = f"vllm-medusa {vllm_medusa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return Check("versions", OK, detail)


def _host() -> Check:
    from vllm_medusa.host.compat import TESTED, host_version, version_problem

    version = host_version()
    problem = version_problem(version)
    if problem:
        return Check("vLLM", BAD, problem)
    if version not in TESTED:
        return Check("vLLM", NOTE, f"{version}: in the supported range; tested are {', '.join(TESTED)}")
    return Check("vLLM", OK, f"{version}, a tested version")


def _contract() -> Check:
    from vllm_medusa.host.compat import find_problems, full_contract

    contract = full_contract()
    problems = find_problems(contract)
    if problems:
        return Check("host contract", BAD, "; ".join(problems))
    return Check("host contract", OK, f"all {len(contract)} names that we rely on are there")


def _plugin() -> Check:
    points = [point.value for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    if not points:
        return Check("plugin", BAD, f"vLLM cannot see it: no entry point in {GROUP}; install vllm-medusa with pip")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        return Check("plugin", BAD, f"VLLM_PLUGINS={allowed!r} keeps it from loading; add {NAME} to it, or unset it")
    return Check("plugin", OK, f"entry point {points[0]}")


def _platform() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check("platform", NOTE, f"{torch.cuda.get_device_name()}: this version serves trees on CPUs only")
    return Check("platform", OK, f"CPU, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")


def _torchvision() -> Check:
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return Check("torchvision", OK, "not installed, not needed")
    except Exception as error:  # noqa: BLE001 (it fails in many ways when built for another torch)
        fix = "built for another torch, it breaks transformers: pip uninstall torchvision torchaudio torchcodec"
        return Check("torchvision", BAD, f"{fix} ({type(error).__name__})")
    return Check("torchvision", OK, "loads")


def _kernel() -> Check:
    from vllm_medusa.attention.cpu import active_kernel

    kernel = active_kernel()
    if kernel == "c++":
        return Check("tree attention", OK, "C++ kernel")
    compiler = shutil.which("c++") or shutil.which("g++")
    return Check("tree attention", NOTE, f"the gather path serves (compiler: {compiler or 'none found'})")


def _heads() -> Check:
    from vllm_medusa.heads.checkpoint import read_config

    try:
        config = read_config(bundled_heads())
    except MedusaError as error:
        return Check("bundled heads", BAD, str(error))
    return Check("bundled heads", OK, f"{config.num_heads} heads for {config.base_model}")


CHECKS: tuple[Callable[[], Check], ...] = (
    _versions,
    _host,
    _contract,
    _plugin,
    _platform,
    _torchvision,
    _kernel,
    _heads,
)
