"""What docs/training.md tells people to type is there: commands, options, defaults, files."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer

from vllm_medusa.cli import app
from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.sizes import row_bytes

# Of vLLM, handed on.
VLLMS = ("--data-parallel-size", "--gpu-memory-utilization", "--hf-token")


@pytest.fixture
def guide(repository: Path) -> str:
    return (repository / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.fixture
def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_every_command_parses(guide: str, commands: dict[str, Any]) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    typed = [shlex.split(line, comments=True) for line in lines]
    typed += [words[words.index("-m") + 1 :] for words in typed if words[0] == "torchrun"]
    ours = [words[1:] for words in typed if words[0] in ("vllm-medusa", "vllm_medusa")]
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
        assert (
            option in defaults
            or option.replace("--no-", "--") in defaults
            or option in ("--to", "--plain", "--plot", *VLLMS)
        ), option


def test_files_it_names_are_there(guide: str, repository: Path) -> None:
    for link in re.findall(r"\]\((\.\./[^)]+)\)", guide):
        assert (repository / "docs" / link).exists(), link
    for script in re.findall(r"`(benchmarks/\w+\.py)`", guide):
        assert (repository / script).exists(), script


class Model(NamedTuple):
    """Of a model's config.json."""

    parameters: float
    hidden: int
    layers: int
    kv_heads: int
    devices: int
    vocab: int = 128_256
    head_size: int = 128


def test_the_examples_on_paper_are_counted_right(guide: str) -> None:
    section = guide.split("### Two examples")[1].split("```")[0]
    table = re.findall(r"^\| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    said = {name: values for name, *values in table if name != "---"}
    tokens, requests, context, bandwidth = 2_000_000, 128, 1_000, 3.35e12
    for place, model in enumerate((Model(8.03e9, 4096, 32, 8, 1), Model(70.55e9, 8192, 80, 8, 8))):
        weights, a_token = 2 * model.parameters, row_bytes(model.hidden)
        cache = requests * context * 2 * 2 * model.layers * model.kv_heads * model.head_size
        step = (weights + cache) / model.devices / bandwidth
        config = HeadsConfig(
            num_heads=4, num_layers=0, trunk_size=1152, root_conditioned=True, hidden_size=model.hidden,
            vocab_size=model.vocab, draft_vocab_size=8192,
        )  # fmt: skip
        with torch.device("meta"):
            trained = sum(weight.numel() for weight in MedusaHeads(config).parameters())
        # Forward, and twice that back; logits of each head and their gradient, through a matrix that is not learnt.
        a_row = 3 * 2 * trained + 2 * 4 * 2 * 8192 * model.hidden
        found = {
            "rows on disk": f"{a_token / 1e3:.1f} KB a token, {tokens * a_token / 1e9:.1f} GB",
            "weights, a GPU": f"{weights / model.devices / 1e9:.1f} GB",
            "cache of the 128 texts, a GPU": f"{cache / model.devices / 1e9:.1f} GB",
            "answering, at least": f"{tokens / requests * step / 60:.1f} minutes",
            "trained weights of the heads": f"{trained / 1e6:.1f} million",
            "these with gradients and Adam, a GPU": f"{16 * trained / 1e9:.2f} GB",
            "the target's two matrices, a GPU": f"{2 * 2 * model.vocab * model.hidden / 1e9:.1f} GB",
            "arithmetic of two epochs": f"{2 * tokens * a_row / 1e15:.1f} PFLOP",
        }
        assert {name: values[place].strip() for name, values in said.items()} == found
