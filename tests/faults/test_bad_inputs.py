"""Spoilt folders of heads and trees, each one clear error: nothing runs, nothing is written, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from bad_configs import CONFIGS
from bad_trees import TREES
from bad_weights import WEIGHT_FILES
from good_folders import edit_config, edit_tensors, listing, make_faster, make_ours, make_target, make_vllm
from typer.testing import CliRunner

from vllm_medusa.cli import app
from vllm_medusa.errors import MedusaError
from vllm_medusa.heads.checkpoint import load_heads, read_config

FOLDERS = CONFIGS | WEIGHT_FILES
runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def refused(arguments: list[str], says: str) -> str:
    """The one line that a command answers with."""
    result = runner.invoke(app, arguments)
    assert result.exit_code in (1, 2), (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: medusa: ") and says in lines[0], result.stderr
    assert result.stdout == ""
    return lines[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_spoilt_folder_is_one_error(name: str, tmp_path: Path) -> None:
    """From every command that reads heads, the same one."""
    case = FOLDERS[name]
    heads, target = case.make(tmp_path / "heads"), make_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    read_config(heads), load_heads(heads)  # good before
    case.spoil(heads)
    before = listing(tmp_path)
    said = {refused(["convert", str(heads), str(tmp_path / "new"), "--to", "ours"], case.says)}
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl")]
    said.add(refused(["calibrate", "--heads", str(heads), "--model", str(target), *prompts], case.says))
    if not case.by_values:
        said.add(refused(["inspect", str(heads)], case.says))
        with pytest.raises(MedusaError):
            read_config(heads)
    assert len(said) == 1
    assert listing(tmp_path) == before, "nothing is written, and no canary"


def test_cases_are_many() -> None:
    assert len(FOLDERS) + len(TREES) > 160


@pytest.mark.parametrize("name", TREES)
def test_a_spoilt_tree_is_one_error(name: str, tmp_path: Path) -> None:
    """As a file and, where it is text that may stand on a command line, there."""
    case = TREES[name]
    heads, file = make_ours(tmp_path / "heads"), tmp_path / "tree.json"
    case.write(file)
    before = listing(tmp_path)
    refused(["inspect", str(heads), "--tree", str(file)], case.says)
    if case.text is not None and case.text.startswith("[") and len(case.text) < 100_000:
        refused(["inspect", str(heads), "--tree", case.text], case.says)
    assert listing(tmp_path) == before


TREE_NAMES = ["", "oak", "dynamic", "tree.yaml", "a[/b].json", "[/]", "\ud800", "x" * 5000 + ".json"]


@pytest.mark.parametrize("tree", TREE_NAMES, ids=ascii)
def test_a_tree_by_a_wrong_name_is_one_error(tree: str, tmp_path: Path) -> None:
    refused(["inspect", str(make_ours(tmp_path / "heads")), "--tree", tree], "tree=")


NAMES = ["nowhere", "../nowhere", "./lab/heads", "~nobody-here/heads", "x" * 5000, "a\0b", "lab/a/b", "/dev/null"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_heads_by_a_wrong_name_are_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = {refused(["inspect", name], "model="), refused(["convert", name, "new", "--to", "ours"], "model=")}
    assert len(said) == 1 and "hub did not" not in said.pop(), "no folder, and no name of a repository either"
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("place", ["heads", "file", "file/x", "link", "."])
def test_a_place_that_cannot_take_converted_heads(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make_ours(tmp_path / "heads")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    refused(["convert", str(heads), place, "--to", "ours"], "dst=")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("matrix", [(50,), (50, 16, 1), (0, 16), (50, 8), (9, 16)])
def test_a_target_with_other_matrices_is_one_error(matrix: tuple[int, ...], tmp_path: Path) -> None:
    import torch

    heads, target = make_vllm(tmp_path / "heads"), make_target(tmp_path / "target")
    edit_tensors(target, lm_head__weight=torch.zeros(matrix))
    refused(["convert", str(heads), str(tmp_path / "new"), "--to", "ours", "--model", str(target)], "")


def test_a_target_without_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    heads, target = make_ours(tmp_path / "heads"), make_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    arguments = ["--heads", str(heads), "--model", str(target), "--prompts", str(tmp_path / "prompts.jsonl")]
    before = listing(tmp_path)
    refused(["calibrate", *arguments], "its tokenizer cannot be read")
    assert listing(tmp_path) == before


PROMPTS = ["[" * 100_000, "{", "[]", '{"turns": []}', '{"prompt": 3}', '{"prompt": ""}', "\n\n", '{"text": "x"}']


@pytest.mark.parametrize("line", PROMPTS, ids=range(len(PROMPTS)))
def test_spoilt_prompts_are_one_error(line: str, tmp_path: Path) -> None:
    heads, target = make_ours(tmp_path / "heads"), make_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(line)
    arguments = ["--heads", str(heads), "--model", str(target), "--prompts", str(tmp_path / "prompts.jsonl")]
    refused(["calibrate", *arguments], "prompts=")


def test_files_of_others_are_not_copied_along(tmp_path: Path) -> None:
    """A README that is a link to somebody's key would be published with the converted heads."""
    heads = make_faster(tmp_path / "heads")
    (tmp_path / "key").write_text("secret")
    (heads / "README.md").symlink_to(tmp_path / "key")
    (heads / "LICENSE").write_text("free")
    result = runner.invoke(app, ["convert", str(heads), str(tmp_path / "new"), "--to", "ours"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["LICENSE", "config.json", "model.safetensors"]


def test_files_of_the_hubs_cache_are(tmp_path: Path) -> None:
    """They are links into a store beside the snapshot."""
    good, snapshot, blobs = make_faster(tmp_path / "good"), tmp_path / "repo/snapshots/abc", tmp_path / "repo/blobs"
    (good / "README.md").write_text("about")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in good.iterdir():
        shutil.copy(file, blobs / file.name.upper())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name.upper()}")
    result = runner.invoke(app, ["convert", str(snapshot), str(tmp_path / "new"), "--to", "ours"])
    assert result.exit_code == 0 and (tmp_path / "new" / "README.md").read_text() == "about"


def test_a_folder_without_rights_is_one_error() -> None:
    """In a child that is nobody if we are root, who may read everything."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        heads = make_ours(Path(place) / "heads")
        for locked, says in ((heads, "may not be read"), (heads / "config.json", "Permission denied")):
            locked.chmod(0)
            assert says in _as_nobody(heads)
            locked.chmod(0o755)
        (heads / "model.safetensors").chmod(0)
        assert "model.safetensors" in _as_nobody(heads)


def _as_nobody(heads: Path) -> str:
    """What reading heads says to somebody without rights."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        said = "read them"
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            read_config(heads)
        except MedusaError as error:
            said = str(error)
        except BaseException as error:  # noqa: BLE001 (the child must end here, whatever happens)
            said = repr(error)
        os.write(send, said.encode())
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive, "rb") as answer:
        return answer.read().decode()


@pytest.mark.skipif(os.environ.get("MEDUSA_LONG") != "1", reason="MEDUSA_LONG=1: tests/test_cli.py has its like")
def test_the_command_itself_answers_in_one_line(tmp_path: Path) -> None:
    """Once as a process of its own: what the others see in this one is what users see."""
    heads = make_ours(tmp_path / "heads")
    edit_config(heads, num_heads="3")
    command = [sys.executable, "-m", "vllm_medusa.cli", "inspect", str(heads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "num_heads='3'" in done.stderr


VALUES = {"digits": 10**5000, "lists": [[[[0]]]] * 9, "bytes": b"\xff" * 999, "terminal": "a\nb\x1b[2J\ud800"}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_any_value_can_be_told(value: Any) -> None:
    message = str(MedusaError.of("key\n", value, "fix\r\nit"))
    assert message.isprintable() and "key" in message and len(message) < 200
    json.dumps(message).encode("ascii")


def test_a_value_nested_beyond_any_stack_can_be_told() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "too large to show" in str(MedusaError.of("tree", deep, "give paths"))
