"""The project's pages as tests read them: code blocks, commands, links and headings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"sh", "python", "text", "json", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block, or a line of an example's header that tells how to run it."""

    page: str
    line: int
    language: str
    body: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that tells people what to do."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    found = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(name, text.count("\n", 0, match.start()) + 1, language, body))
    return found


def headers() -> list[Block]:
    """The lines in examples' headers that tell how to run them."""
    found = []
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix not in (".py", ".sh"):
            continue
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        header = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text.split("\nset ")[0]
        told = re.findall(rf"(?:python )?{re.escape(name)}[^\n]*", header)
        assert told, f"{name} does not say how it is run"
        found += [Block(name, 1, "sh", line) for line in told]
    return found


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block, one a line, without comments and with continued lines joined."""
    for line in block.body.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if line:
            yield re.sub(r"\s+", " ", line)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    """What stands between single backticks."""
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """What a link may name behind #, as GitHub makes it of headings."""
    titles = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def is_test(name: str) -> bool:
    """Whether a test, named as folder/test_file.py::test_function below tests/, is there."""
    file, _, function = name.partition("::")
    path = ROOT / "tests" / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)
