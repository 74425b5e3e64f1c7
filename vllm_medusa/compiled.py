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

import torch  # its OpenMP runtime must be there first, and becomes ours

from vllm_medusa.cache_folder import user_cache

_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_BUILD_SECONDS = 300
Loaded = TypeVar("Loaded")
_PACKAGE = Path(__file__).parent
_HEADERS = ("attention/kernel", "linear")  # folders whose headers any source may include


class CannotBuild(Exception):
    """Why a library is not to be had on this machine, in words for a log."""


class _NoCompiler(Exception):
    """None is found: not to be mistaken for a folder that is not there."""


def load_operators(source: Path) -> Path:
    """Let torch know the operators of one source file, built with torch's own headers (some twenty seconds).

    Returns:
        The library.

    Raises:
        CannotBuild: as of `load_library`.
    """
    torch_folder = Path(torch.__file__).parent
    flags = (*_FLAGS, "-O2", "-std=c++20", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu")

    def load(library: str) -> Path:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        return Path(library)

    return _load(source, flags, load)


def load_library(source: Path) -> ctypes.CDLL:
    """The library of one source file, built if this machine has none yet (a few seconds).

    Builds go to torch's folder for extensions (TORCH_EXTENSIONS_DIR, or the user's cache), named by everything that
    they depend on, and appear there at once and whole: processes that start together do not disturb each other.

    Raises:
        CannotBuild: no compiler, one that fails, a folder that cannot be written.
    """
    return _load(source, _FLAGS, ctypes.CDLL)


def instruction_set() -> str:
    """What our C++ is built for, as -march: this processor, or less of it where torch was told to use less.

    `ATEN_CPU_CAPABILITY=avx2` keeps torch from AVX-512, and so it does us.
    """
    return "x86-64-v3" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "native"


def _load(source: Path, flags: tuple[str, ...], load: Callable[[str], Loaded]) -> Loaded:
    try:
        return load(str(_build(source, flags)))
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


def _build(source: Path, flags: tuple[str, ...]) -> Path:
    flags = (f"-march={instruction_set()}", *flags)
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "c++"))), None)
    if compiler is None:
        raise _NoCompiler
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = hashlib.sha256("\0".join([compiler, version, *flags, torch.__version__, processor()]).encode())
    for file in (source, *(header for folder in _HEADERS for header in sorted((_PACKAGE / folder).glob("*.h")))):
        key.update(file.read_bytes())
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = (Path(root) if root else user_cache() / "torch_extensions") / "vllm_medusa"
    library = folder / f"{source.stem}_{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        unfinished = Path(place) / library.name
        command = [compiler, str(source), *flags, "-o", str(unfinished)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_SECONDS)
        unfinished.replace(library)
    return library


def processor() -> str:
    """Name and features of this processor, on which -march=native depends: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
