"""Users without a home: what is kept between runs goes to a folder that only they can write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_medusa import cache_folder
from vllm_medusa.cache_folder import user_cache

CODE = """
from pathlib import Path
try:
    Path.home()
except RuntimeError:
    print("nobody")
from vllm_medusa.attention.cpu import active_kernel
from vllm_medusa.cache_folder import user_cache
from vllm_medusa.defaults import resolve
from vllm_medusa.doctor import machine
from vllm_medusa.doctor.pair import check_pair
from vllm_medusa.errors import MedusaError
from vllm_medusa.smollm2 import cached_model
try:
    resolve("~nobody-of-this-name/model", None)
except MedusaError as error:
    print("no such folder" in str(error))
print(user_cache().stat().st_mode & 0o777 == 0o700, cached_model().is_relative_to(user_cache()))
print(active_kernel(), machine.check_caches().state, [finding.state for finding in check_pair(None, None)])
"""


def test_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache"


def test_an_unknown_user_without_a_home(tmp_path: Path) -> None:
    """In a user namespace of its own, as a container started under a number."""
    unknown = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
    if shutil.which("unshare") is None or subprocess.run([*unknown, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no user namespaces")
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    environment = {**kept, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    command = [*unknown, sys.executable, "-c", CODE]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    said = found.stdout.splitlines()
    assert said[:3] == ["nobody", "True", "True True"]
    kernel, state, *pair = said[3].split()
    assert kernel == ("c++" if shutil.which("g++") else "gather")
    assert state == "note" and pair == ["['ok',", "'ok']"]
    assert (tmp_path / "vllm-medusa-54321").is_dir()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder.tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"vllm-medusa-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    cache_folder._temporary_cache.cache_clear()
    try:
        found = cache_folder._temporary_cache()
    finally:
        cache_folder._temporary_cache.cache_clear()
    assert found != taken and found.stat().st_mode & 0o077 == 0
