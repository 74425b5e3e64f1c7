"""Settings that every test shares. Nothing here starts an engine or imports torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Before any test imports vLLM. Set by the environment, these stay as they are.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# vLLM 0.32 on CPU saves ahead-of-time compiled models that it cannot load again: every start would take a minute more.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Our commands quiet vLLM for their process; called inside a test they would quiet the servers of later tests."""
    before = os.environ.get("VLLM_LOGGING_LEVEL")
    yield
    if before is None:
        os.environ.pop("VLLM_LOGGING_LEVEL", None)
    else:
        os.environ["VLLM_LOGGING_LEVEL"] = before


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root folder."""
    return ROOT


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library of ours is built so far, and there is nothing to build one with."""
    from vllm_medusa.attention.native import load_kernel
    from vllm_medusa.heads.native import library
    from vllm_medusa.tree.native import load

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for loader in (load_kernel, library, load):
        loader.cache_clear()
    yield
    for loader in (load_kernel, library, load):
        loader.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none; torch is imported only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
