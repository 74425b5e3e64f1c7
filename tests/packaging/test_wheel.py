"""The wheel: all that serving needs is inside, and it works in an environment of its own."""

import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import vllm_medusa

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    shutil.copytree(repository / "vllm_medusa", copy / "vllm_medusa", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_is_inside(wheel: Path, source: Path) -> None:
    """Every file of the package, not only those that someone remembered: heads, kernel source, prompts, py.typed."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    wanted = {file.relative_to(source).as_posix() for file in (source / "vllm_medusa").rglob("*") if file.is_file()}
    assert wanted - names == set()
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_version_has_one_source(wheel: Path) -> None:
    assert wheel.name.startswith(f"vllm_medusa-{vllm_medusa.__version__}-py3-none-any")


def test_sdist_builds(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    name = run(sys.executable, "-c", code, cwd=source).splitlines()[-1]
    assert (tmp_path / name).stat().st_size > 1000


def test_works_from_its_own_environment(wheel: Path, tmp_path: Path) -> None:
    """A new environment with the wheel in it; the dependencies are borrowed from this one."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (packages,) = (home / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    python = home / "bin" / "python"
    where = run(python, "-c", "import vllm_medusa; print(vllm_medusa.__file__)", cwd=tmp_path).strip()
    assert where.startswith(str(packages))
    assert "demo" in run(python, "-m", "vllm_medusa.cli", "--help", cwd=tmp_path)
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    assert "vllm_medusa.plugin:register" in run(python, "-c", code, cwd=tmp_path)
