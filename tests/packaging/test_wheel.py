"""What is published: the source distribution, the wheel that is built from it, and an environment of its own."""

import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import vllm_medusa
from vllm_medusa.compiled import load_library, load_operators

pytestmark = pytest.mark.slow
FILES = ("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
FILES += ("THIRD_PARTY_NOTICES.md", ".pre-commit-config.yaml")
FOLDERS = ("vllm_medusa", "docs", "examples", "tests", "benchmarks", ".ci", ".github")


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(repository / name, copy)
    for name in FOLDERS:
        shutil.copytree(repository / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    name = run(sys.executable, "-c", code, cwd=source).splitlines()[-1]
    with tarfile.open(folder / name) as opened:
        opened.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution: what is missing there is missing here."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel installed; the dependencies are borrowed from this one."""
    home = tmp_path_factory.mktemp("home") / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def files_of(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_the_source_distribution_is_the_whole_checkout(sdist: Path, source: Path) -> None:
    assert {name for name in files_of(source) if ".egg-info/" not in name} - files_of(sdist) == set()


def test_everything_is_inside(wheel: Path, source: Path) -> None:
    """Every file of the package, not only those that someone remembered: heads, kernel source, prompts, py.typed."""
    names = names_in(wheel)
    wanted = {f"vllm_medusa/{name}" for name in files_of(source / "vllm_medusa")}
    assert wanted - names == set()
    assert {Path(name).suffix for name in wanted} >= {".cpp", ".h", ".jsonl", ".safetensors", ".typed"}


def test_nothing_else_is_inside(wheel: Path) -> None:
    metadata = f"vllm_medusa-{vllm_medusa.__version__}.dist-info/"
    assert not [name for name in names_in(wheel) if not name.startswith(("vllm_medusa/", metadata))]


def test_licence_and_notices_travel_with_it(wheel: Path) -> None:
    licences = {Path(name).name for name in names_in(wheel) if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY_NOTICES.md"}
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("METADATA"))
        metadata = Parser().parsestr(opened.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"


def test_version_has_one_source(wheel: Path, sdist: Path) -> None:
    assert wheel.name.startswith(f"vllm_medusa-{vllm_medusa.__version__}-py3-none-any")
    assert sdist.name == f"vllm_medusa-{vllm_medusa.__version__}"


def test_works_from_its_own_environment(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import vllm_medusa; print(vllm_medusa.__file__)", cwd=tmp_path).strip()
    assert where.startswith(str(python.parents[1]))
    command = python.with_name("vllm-medusa")
    assert "demo" in run(command, "--help", cwd=tmp_path)
    shown = run(command, "inspect", "--tree", "chain", cwd=tmp_path)
    assert "SmolLM2-135M-Instruct" in shown and "tokens per step" in shown
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    assert "vllm_medusa.plugin:register" in run(python, "-c", code, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler on this machine")
def test_its_kernels_are_built_from_what_is_installed(python: Path, tmp_path: Path) -> None:
    """The sources are found, and are those of this checkout: what was built from these is not built again."""
    code = (
        "import vllm_medusa; from pathlib import Path; from vllm_medusa.compiled import load_library, load_operators\n"
        "for source in sorted(Path(vllm_medusa.__file__).parent.rglob('*.cpp')):\n"
        "    print(load_operators(source) if source.stem == 'cpu_linear' else load_library(source)._name)"
    )
    sources = sorted(Path(vllm_medusa.__file__).parent.rglob("*.cpp"))
    ours = [load_operators(s) if s.stem == "cpu_linear" else load_library(s)._name for s in sources]
    assert run(python, "-c", code, cwd=tmp_path).split() == [str(library) for library in ours]
