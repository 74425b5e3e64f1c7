"""What pages say besides commands: tables and pictures that are computed, names and figures that are looked up."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest
from documents import ROOT, anchors, blocks, inline_code, links, pages

LINKED = [*pages(), ROOT / "CHANGELOG.md", ROOT / "THIRD_PARTY_NOTICES.md"]
LINKED += sorted((ROOT / "vllm_medusa" / "assets").rglob("README.md"))
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def one_step() -> ModuleType:
    """examples/one_step.py."""
    spec = importlib.util.spec_from_file_location("one_step", ROOT / "examples" / "one_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target == ROOT or ROOT in target.parents, f"{page.name} links out of the repository: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; {target.name} has no such heading"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_are_there(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(r"(vllm_medusa|tests|examples|benchmarks|docs)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{page.name} names {code}"


def test_the_worked_example_is_what_the_code_does(one_step: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    one_step.main()
    printed = [part.partition("\n")[2].strip("\n") for part in capsys.readouterr().out.split("\n\n")]
    shown = [block.body.strip("\n") for block in blocks(DOCS / "architecture.md") if block.language == "text"]
    assert shown == printed and len(shown) == 4


def test_the_picture_is_what_the_code_does(one_step: ModuleType) -> None:
    from vllm_medusa.host.commit import find_moves

    step = one_step.lay(one_step.propose())
    walk = one_step.walk(step)
    rows, path = step.parents.shape[1] + 1, walk.rows[0].tolist()
    words = ["the", *(one_step.WORDS[token] for token in step.tokens[0])]
    parts = {part.get("id"): part for part in ElementTree.parse(DOCS / "one_step.svg").iter() if part.get("id")}

    sees = {
        (row, 1 + bit) for row in range(rows) for bit in range(rows - 1) if int(step.ancestors[0, row, 0]) >> bit & 1
    }
    sees |= {(row, 0) for row in range(rows)}
    assert {name for name in parts if name.startswith("sees-")} == {f"sees-{row}-{column}" for row, column in sees}
    edges = {f"edge-{parent}-{row}" for row, parent in enumerate(step.parents[0].tolist(), start=1)}
    assert {name for name in parts if name.startswith("edge-")} == edges
    dark = {row for row in range(rows) if parts[f"node-{row}"].get("fill") == "#000"}
    assert dark == set(path)
    for row in range(rows):
        assert parts[f"position-{row}"].text == f"pos {one_step.CACHED + step.depths[0, row]}"
        assert parts[f"word-{row}"].text == parts[f"before-{one_step.CACHED + row}"].text == words[row]
        if row:
            assert parts[f"reach-{row}"].text == f"{step.reach[0, row - 1]:.3f}".lstrip("0")
    moved = {
        f"slot-{one_step.CACHED + s}-{one_step.CACHED + t}"
        for s, t in zip(*find_moves(step, walk.rows.numpy()), strict=True)
    }
    stayed = {f"slot-{one_step.CACHED + row}-{one_step.CACHED + row}" for place, row in enumerate(path) if row == place}
    assert {name for name in parts if name.startswith("slot-")} == moved | stayed
    after = [parts[f"after-{one_step.CACHED + row}"].text for row in range(rows)]
    assert after == [words[row] for row in path] + ["free"] * (rows - len(path))


def methods(file: str, name: str) -> list[str]:
    """Methods of a class in one of our files, without importing it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node.name for node in found.body if isinstance(node, ast.FunctionDef)]


def test_the_runner_overrides_what_the_page_says() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("| method | what it adds |") :].split("\n\n")[0]
    told = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    ours = methods("vllm_medusa/host/v1/runner.py", "MedusaModelRunnerV1")
    assert len(told) >= 9 and set(told) <= set(ours)
    from vllm_medusa.host.compat import full_contract

    known = {symbol.name.rpartition(".")[2] for symbol in full_contract()}
    assert {name for name in told if name != "take_draft_token_ids"} <= known, "what we override is in the contract"


def test_the_hooks_that_the_page_names_are_in_the_files_it_names() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("| file | what it hooks") :].split("\n\n")[0]
    rows = re.findall(r"^\| `([\w/.]+)` \| ([^|]*)\|", table, re.MULTILINE)
    assert len(rows) >= 13
    for file, hook in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", hook):
            # As it is written, or a method after its class.
            assert all(part in text for part in ([name] if name in text else name.split("."))), f"{file}: {name}"


def test_attributes_are_used_where_the_page_says() -> None:
    page = (DOCS / "host-versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", page, re.MULTILINE)
    assert len(rows) >= 15
    for attribute, file in rows:
        assert re.search(rf"\b{attribute}\b", (ROOT / file).read_text(encoding="utf-8")), f"{file}: {attribute}"


def test_figures_of_the_cost_table_are_those_recorded() -> None:
    page = (DOCS / "tuning.md").read_text(encoding="utf-8")
    (name,) = set(re.findall(r"`([\w.-]+\.json)`", page)) - {"out.json"}
    cost = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["cost"]["medusa"]
    milliseconds = {str(row["tokens"]): row["milliseconds"] for row in cost["steps"]}
    sizes, times = (
        re.search(rf"^\| {title} \|(.*)\|$", page, re.MULTILINE)[1].split("|")  # type: ignore[index]
        for title in ("tokens in a step", "milliseconds")
    )
    for size, time in zip(sizes, times, strict=True):
        assert float(time) == round(milliseconds[size.strip()], 1)
    for row in cost["nodes"]:
        most = "128+" if row["break_even"] == 128 else row["break_even"]
        told = f"| {row['batch_size']} | {row['drafted']:.1f} | {row['accepted_length']:.2f} | {most} |"
        assert told in page
    slower = milliseconds["16"] / milliseconds["1"]
    assert f"{slower:.2f} times" in page and f"{cost['nodes'][0]['accepted_length']:.2f} tokens: that" in page
    nodes = [f"{row['drafted']:.0f}" for row in cost["nodes"]]
    assert f"{', '.join(nodes[:-1])} and {nodes[-1]} nodes" in page.replace("\n", " ")


def test_every_fault_that_was_found_has_its_test() -> None:
    """The page names a file and a function in it; "…" stands for the file of the line before."""
    named = re.findall(r"`([\w/]+\.py|…)::(test_\w+)", (DOCS / "faults.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    file = ""
    for given, name in named:
        file = file if given == "…" else given
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
