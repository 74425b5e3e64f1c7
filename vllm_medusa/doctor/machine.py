"""The machine and the environment variables by which vLLM uses it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vllm_medusa.cache_folder import user_cache
from vllm_medusa.doctor.finding import Finding
from vllm_medusa.quota import limited_memory, usable_cores, usable_memory

GIB = 2**30


def check_platform() -> Finding:
    """What computes."""
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        detail = f"{torch.cuda.get_device_name()}: trees are served there, but nobody has measured that yet"
        return Finding("platform", "note", detail, "in a clone, make gpu-check and make gpu-e2e show what holds here")
    return Finding("platform", "ok", f"CPU, {_cores(cores)}, torch {torch.__version__}")


def check_kernel() -> Finding:
    """Which code computes tree attention, and why not the faster one."""
    from vllm_medusa import attention
    from vllm_medusa.attention.cpu import active_kernel
    from vllm_medusa.compiled import CannotBuild, load_library

    if active_kernel() == "c++":
        return Finding("tree attention", "ok", "the C++ kernel")
    serving = "the slower way in PyTorch serves"
    try:
        load_library(Path(str(attention.__file__)).with_name("cpu_kernel.cpp"))
    except CannotBuild as error:
        reason, _, advice = " ".join(str(error).split()).partition("; ")
        if "compiler failed" in reason:
            advice = "name another compiler in CXX (C++17 with OpenMP)"
        elif "no C++ compiler" not in reason:
            advice = "name a folder that you may write in TORCH_EXTENSIONS_DIR"
        return Finding("tree attention", "note", f"{serving}: {reason[:300]}", advice)
    return Finding("tree attention", "note", serving)


def check_compiler() -> Finding:
    """vLLM compiles models on a CPU with a C++ compiler of the system's."""
    named = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, (named or "g++", "g++", "c++"))), None)
    if found is None:
        detail = "no C++ compiler: vLLM cannot compile models, and steps stay slow"
        return Finding("compiler", "note", detail, "install g++ (and python3-dev), or serve with --enforce-eager")
    if named and shutil.which(named) is None:
        return Finding("compiler", "note", f"CXX={named!r} is not there; {found} is", "correct CXX, or unset it")
    return Finding("compiler", "ok", found)


def check_caches() -> Finding:
    """Folders in which compiled code is kept between starts."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    kernels = (Path(root) if root else user_cache() / "torch_extensions") / "vllm_medusa"
    models = Path(os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or "~/.cache/vllm"))
    if str(models).startswith("~"):
        detail = (
            f"HOME is not set, and user id {os.getuid()} has no home: vLLM keeps compiled models below {Path.cwd()}"
        )
        return Finding("caches", "note", detail, "set HOME to a folder that you may write, and USER to any name")
    for what, folder, variable in (("kernels", kernels, "TORCH_EXTENSIONS_DIR"), ("models", models, "VLLM_CACHE_ROOT")):
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            detail = f"compiled {what} cannot be kept: {place} cannot be written"
            return Finding("caches", "note", detail, f"name a folder that you may write in {variable}")
    return Finding("caches", "ok", f"{kernels}, {models}")


def check_threads() -> Finding:
    """More threads than cores only wait for each other; and vLLM keeps cores free for itself."""
    affine, cores = len(os.sched_getaffinity(0)), usable_cores()
    said = os.environ.get("OMP_NUM_THREADS")
    if said is not None and not (said.isdecimal() and int(said) > 0):
        return Finding("threads", "note", f"OMP_NUM_THREADS={said!r} is no number", f"set it to {cores}, or unset it")
    if said is not None and int(said) > cores:
        detail = f"OMP_NUM_THREADS={said}, but this process may use {_cores(cores)}: threads wait for each other"
        return Finding("threads", "note", detail, f"OMP_NUM_THREADS={cores}, or less where others work too")
    if cores < affine and (said is None or os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "nobind"):
        detail = f"a quota allows {_cores(cores)} of {affine}, which vLLM does not look at: threads wait for their turn"
        return Finding("threads", "note", detail, f"VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS={cores}")
    if cores <= 4 and os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto":
        detail = f"of {_cores(cores)} vLLM keeps one for itself, and computes on {max(cores - 1, 1)}"
        advice = f"VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS={cores} computes on all: measure which is faster"
        return Finding("threads", "note", detail, advice)
    return Finding("threads", "ok", f"{said or 'as many as vLLM chooses'} on {_cores(cores)}")


def check_kv_cache() -> Finding:
    """Without a number vLLM 0.32 takes nearly all memory for its cache, and does not start where others use it."""
    memory = usable_memory()
    there = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    there += " (a quota)" if limited_memory() is not None else ""
    said = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    half = max(int(memory.available / GIB / 2), 1)
    if not said:
        detail = f"VLLM_CPU_KVCACHE_SPACE is not set: vLLM takes 92 % of all memory; {there}"
        return Finding("KV cache", "note", detail, f"VLLM_CPU_KVCACHE_SPACE={half} takes {half} GiB")
    if not said.isdecimal():
        detail = f"VLLM_CPU_KVCACHE_SPACE={said!r} is no whole number of GiB: vLLM does not start"
        return Finding("KV cache", "bad", detail, f"VLLM_CPU_KVCACHE_SPACE={half}")
    if int(said) * GIB > memory.available:
        detail = f"VLLM_CPU_KVCACHE_SPACE={said} GiB, but {there}: vLLM does not start"
        return Finding("KV cache", "bad", detail, f"VLLM_CPU_KVCACHE_SPACE={half}")
    return Finding("KV cache", "ok", f"{said} GiB; {there}")


def check_saved_models() -> Finding:
    """vLLM 0.32 on a CPU saves ahead-of-time compiled models that it cannot load again."""
    from vllm import envs

    from vllm_medusa.host.compat import host_version

    if (host_version() or "").startswith("0.32") and envs.VLLM_USE_AOT_COMPILE:
        detail = "vLLM 0.32 on a CPU saves compiled models that it cannot load again: each start compiles anew"
        return Finding("saved models", "note", detail, "VLLM_USE_AOT_COMPILE=0 starts a minute sooner from the second")
    return Finding("saved models", "ok", "compiled models are found again")


def _cores(number: int) -> str:
    return f"{number} core{'' if number == 1 else 's'}"
