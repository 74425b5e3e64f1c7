"""What docs/training.md tells people to type is there: commands, options, defaults, files."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_medusa.cli import app


@pytest.fixture
def guide(repository: Path) -> str:
    return (repository / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.fixture
def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_every_command_parses(guide: str, commands: dict[str, Any]) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    typed = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    ours = [words[1:] for words in typed if words[0] == "vllm-medusa"]
    assert {words[0] for words in ours} == {"train", "calibrate", "convert", "inspect"}
    for name, *arguments in ours:
        commands[name].make_context(name, arguments)  # raises on an unknown option or a wrong value


def test_every_option_has_the_default_it_is_said_to_have(guide: str, commands: dict[str, Any]) -> None:
    defaults = {option: parameter.default for parameter in commands["train"].params for option in parameter.opts}
    rows = re.findall(r"^\| `(--[\w-]+)`[^|]*\| ([^|]+) \|", guide, re.MULTILINE)
    assert len(rows) == 8
    for option, said in rows:
        wanted = {True: "root"}.get(defaults[option], str(defaults[option]))
        assert said.replace(",", "") == wanted, option
    for option in re.findall(r"`(--[a-z][\w-]+)", guide):
        assert option in defaults or option in ("--to", "--plain", "--plot"), option


def test_files_it_names_are_there(guide: str, repository: Path) -> None:
    for link in re.findall(r"\]\((\.\./[^)]+)\)", guide):
        assert (repository / "docs" / link).exists(), link
    for script in re.findall(r"`(benchmarks/\w+\.py)`", guide):
        assert (repository / script).exists(), script
