"""An unpacked vLLM, read and never imported: are the names there that we rely on, and do they take what we pass?

So a version can be looked at that cannot be installed here: a CUDA build without a GPU, the next release.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_medusa.errors import MedusaError
from vllm_medusa.host.compat import Symbol

_LONGEST_TRAIL = 12  # imports of imports, bases of bases
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition, and the module it stands in; None for a module itself, and for what only running it would tell."""

    module: str
    node: ast.AST | None


class HostSource:
    """The Python files of one vLLM."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the package `vllm`, or what holds it (an unpacked sdist or wheel, a checkout, site-packages).

        Raises:
            MedusaError: there is no vLLM in it.
        """
        inside = [place for place in (folder / "vllm", folder) if (place / "v1" / "core" / "sched").is_dir()]
        if not inside:
            raise MedusaError.of(
                "host_source", str(folder), "no vLLM in it; name a folder with an unpacked sdist or wheel"
            )
        self.package = inside[0]
        self._tree = cache(self._parse)

    def problem(self, symbol: Symbol) -> str | None:
        """What is wrong with a name in this source, or None; in the words of `Symbol.problem`."""
        found = self.find(symbol.module, symbol.name)
        where = f"{symbol.module}.{symbol.name}"
        if found is None:
            return f"{where} is gone"
        taken = self.parameters(found)
        missing = [] if taken is None else [name for name in symbol.parameters if name not in taken]
        return f"{where} no longer takes {', '.join(missing)}" if missing else None

    def find(self, module: str, name: str) -> Found | None:
        """The definition that `module.name` means; `name` may be Class.member."""
        first, *members = name.split(".")
        found = self._global(module, first, _LONGEST_TRAIL)
        for member in members:
            found = None if found is None else self._member(found, member, _LONGEST_TRAIL)
        return found

    def parameters(self, found: Found) -> set[str] | None:
        """What a function, or a class when it is called, takes by name; None where that cannot be told."""
        node = found.node
        if isinstance(node, Function):
            arguments = node.args
            return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if not isinstance(node, ast.ClassDef):
            return None
        made = self._member(found, "__init__", _LONGEST_TRAIL)
        if made is not None:
            return self.parameters(made)
        fields: set[str] = set()
        for _, holder in self._classes(found, _LONGEST_TRAIL):
            named = (part.target for part in holder.body if isinstance(part, ast.AnnAssign))
            fields |= {target.id for target in named if isinstance(target, ast.Name)}
        return fields

    def _parse(self, module: str) -> ast.Module | None:
        place = self._place(module)
        return None if place is None else ast.parse(place.read_text(encoding="utf-8"))

    def _place(self, module: str) -> Path | None:
        root, *parts = module.split(".")
        path = self.package.joinpath(*parts)
        places = [path / "__init__.py", path.with_suffix(".py")] if parts else [path / "__init__.py"]
        return next((place for place in places if root == "vllm" and place.is_file()), None)

    def _global(self, module: str, name: str, trail: int) -> Found | None:
        """A name of a module: defined there, imported there, or a module inside it."""
        tree = self._tree(module)
        if tree is None or trail == 0:
            return None
        imported: list[tuple[str, str]] = []
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                source = self._absolute(module, statement)
                imported += [(source, alias.name) for alias in statement.names if (alias.asname or alias.name) == name]
                imported += [(source, name) for alias in statement.names if alias.name == "*"]
            elif name in _names(statement):
                return Found(module, statement)
        for source, original in imported:
            if source.split(".")[0] != "vllm":
                return Found(source, None)  # of another package
            found = self._global(source, original, trail - 1)
            if found is not None:
                return found
        inner = f"{module}.{name}"
        return Found(inner, None) if self._place(inner) else None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        place = self._place(module)
        parts = module.split(".")
        if place is None or place.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - statement.level + 1]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def _classes(self, found: Found, trail: int) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases inside vLLM, each with its module."""
        if not isinstance(found.node, ast.ClassDef) or trail == 0:
            return
        yield found.module, found.node
        for base in found.node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                above = self._global(found.module, base.id, trail)
                if above is not None:
                    yield from self._classes(above, trail - 1)

    def _member(self, found: Found, name: str, trail: int) -> Found | None:
        """A class's method, field, or an attribute that one of its methods sets; a module's name."""
        if found.node is None and found.module.split(".")[0] == "vllm":
            return self._global(found.module, name, trail)
        if not isinstance(found.node, ast.ClassDef):
            return Found(found.module, None)
        for module, holder in self._classes(found, trail):
            for statement in _statements(holder.body):
                if name in _names(statement):
                    return Found(module, statement)
            for part in ast.walk(holder):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr == name:
                    return Found(module, part)
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, also those inside `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(statement, Function | ast.ClassDef):
                yield from _statements(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _names(statement: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    parts = (part for target in targets if target is not None for part in ast.walk(target))
    return {part.id for part in parts if isinstance(part, ast.Name)}
