"""C++ of ours, built on first use by the compiler that vLLM's CPU path needs too, loaded through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar

import torch  # noqa: F401  (its OpenMP runtime must be there first, and becomes ours)

from vllm_medusa.cache_folder import user_cache

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_BUILD_SECONDS = 300
Loaded = TypeVar("Loaded")
_HEADERS = Path(__file__).with_name("attention") / "kernel"  # any source may include them


class CannotBuild(Exception):
    """Why a library is not to be had on this machine, in words for a log."""


class _NoCompiler(Exception):
    """None is found: not to be mistaken for a folder that is not there."""


def load_library(source: Path) -> ctypes.CDLL:
    """The library of one source file, built if this machine has none yet (a few seconds).

    Builds go to torch's folder for extensions (TORCH_EXTENSIONS_DIR, or the user's cache), named by everything that
    they depend on, and appear there at once and whole: processes that start together do not disturb each other.

    Raises:
        CannotBuild: no compiler, one that fails, a folder that cannot be written.
    """
    try:
        return ctypes.CDLL(str(_build(source)))
    except _NoCompiler:
        reason = "there is no C++ compiler; install g++ or name one in CXX"
    except subprocess.CalledProcessError as error:
        reason = f"the C++ compiler failed: {error.stderr.strip()[-800:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise CannotBuild(reason)


def loaded_once(
    logger: logging.Logger, level: int, without: str
) -> Callable[[Callable[[], Loaded]], Callable[[], Loaded | None]]:
    """Decorates what loads a library: asked once, and None, said once, where it cannot be built.

    Args:
        logger, level: where and how loudly that is said.
        without: how we go on then, a message with one %s for the reason.
    """

    def decorate(load: Callable[[], Loaded]) -> Callable[[], Loaded | None]:
        @lru_cache(maxsize=1)
        @wraps(load)
        def loaded() -> Loaded | None:
            try:
                return load()
            except CannotBuild as error:
                logger.log(level, without, error)
                return None

        return loaded

    return decorate


def _build(source: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "c++"))), None)
    if compiler is None:
        raise _NoCompiler
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = hashlib.sha256("\0".join([compiler, version, *_FLAGS, _processor()]).encode())
    for file in (source, *sorted(_HEADERS.glob("*.h"))):
        key.update(file.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = (Path(root) if root else user_cache() / "torch_extensions") / "vllm_medusa"
    library = folder / f"{source.stem}_{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        unfinished = Path(place) / library.name
        command = [compiler, *_FLAGS, str(source), "-o", str(unfinished)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
        unfinished.replace(library)
    return library


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
