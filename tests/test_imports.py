"""Who may import whom. Each check runs in a fresh interpreter, where nothing has been imported before."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_medusa

PACKAGE = Path(vllm_medusa.__file__).parent
POLICY = ("between.py", "pace.py", "cost.py", "trust.py", "tries.py", "budget.py", "widths.py")
CORE = (
    *("tree", "heads", "attention", "linear", *POLICY, "config.py", "proposer.py", "errors.py"),
    *("json_file.py", "kept.py", "compiled.py"),
)
HEAVY = ("torch", "vllm", "transformers", "numpy", "matplotlib")


def modules(*places: str) -> list[str]:
    """Dotted names of the modules in these files and folders of the package."""
    files = [
        file
        for place in places
        for file in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"))
    ]
    return sorted(
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if file.exists()
    )


def loaded_after(imports: list[str], watched: tuple[str, ...]) -> list[str]:
    """Which of the watched top-level packages a fresh interpreter has loaded after these imports."""
    code = (
        f"import sys, importlib\nfor name in {imports!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {watched!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_package_is_light() -> None:
    assert loaded_after(["vllm_medusa"], HEAVY) == []


def test_command_line_is_light() -> None:
    """`vllm-medusa --help` answers at once."""
    assert loaded_after(["vllm_medusa.cli"], HEAVY) == []


def test_bench_drives_vllm_from_outside() -> None:
    """The bench's own process stays small: torch and vLLM live in the engines' processes."""
    names = [name for name in modules("bench") if not name.endswith(".driver")]
    assert loaded_after(names, ("torch", "vllm", "transformers")) == []


def test_core_never_imports_vllm() -> None:
    assert loaded_after(modules(*CORE), ("vllm",)) == []


@pytest.mark.parametrize("name", modules(*CORE))
def test_core_source_never_names_vllm(name: str) -> None:
    """Not in a function either, which the check by import would miss."""
    file = PACKAGE.parent / Path(*name.split("."))
    source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text(encoding="utf-8")
    imported = {
        alias.name if isinstance(node, ast.Import) else (node.module or "")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not [module for module in imported if module.split(".")[0] == "vllm"]


@pytest.mark.parametrize("name", modules(*CORE))
def test_dependencies_run_one_way(name: str) -> None:
    """The core knows neither the host nor what drives it from outside."""
    file = PACKAGE.parent / Path(*name.split("."))
    source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text(encoding="utf-8")
    for outer in ("host", "training", "bench", "cli", "commands", "plugin"):
        assert f"vllm_medusa.{outer}" not in source
