"""Examples in docstrings are true, and what people use from Python has some."""

import ast
import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

import vllm_medusa

PACKAGE = Path(vllm_medusa.__file__).parent
PUBLIC = {
    "vllm_medusa": [""],
    "vllm_medusa.config": ["MedusaConfig", "resolve"],
    "vllm_medusa.errors": ["MedusaError"],
    "vllm_medusa.tree.topology": ["Tree", "Tree.chain", "Tree.reach", "Tree.ancestor_masks", "depths_of", "keep_nodes"],
    "vllm_medusa.tree.choices": ["parse_choices", "to_choices"],
    "vllm_medusa.tree.growth": ["grow_static", "grow_dynamic"],
    "vllm_medusa.tree.mixture": ["grow_mixture"],
    "vllm_medusa.tree.lookup": ["Lookups"],
    "vllm_medusa.tree.walk": ["greedy_walk", "step_to_child"],
    "vllm_medusa.tree.rejection": ["draw_children", "recursive_rejection"],
    "vllm_medusa.tree.drawing": ["draw"],
    "vllm_medusa.cost": ["StepCost", "grid_size"],
    "vllm_medusa.budget": ["NodeBudget.share"],
    "vllm_medusa.trust": ["Trust", "at_temperature"],
    "vllm_medusa.tries": ["Tries"],
}


def examples() -> list[Any]:
    """Modules with examples; those that import vLLM take seconds and are marked."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if ">>> " not in text:
            continue
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        imports_vllm = any(
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for node in ast.parse(text).body
        )
        found.append(pytest.param(name, marks=pytest.mark.slow if imports_vllm else ()))
    return found


@pytest.mark.parametrize("name", examples())
def test_examples_are_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLIC)
def test_what_people_use_has_examples(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {test.name.removeprefix(name).lstrip(".") for test in finder.find(module, name) if test.examples}
    assert set(PUBLIC[name]) - found == set()


def test_every_public_name_of_the_core_has_a_docstring() -> None:
    missing = []
    for name in PUBLIC:
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or getattr(value, "__module__", None) != name or not callable(value):
                continue
            if not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{attribute}("):
                missing.append(f"{name}.{attribute}")
    assert missing == []
