"""Every command that a page or an example's header shows is run here, or by the test that a table here names."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from documents import LANGUAGES, ROOT, Block, blocks, commands, headers, inline_code, is_test, pages
from typer.testing import CliRunner

from vllm_medusa.cli import app
from vllm_medusa.config import MedusaConfig
from vllm_medusa.defaults import bundled_heads

BLOCKS = [block for page in pages() for block in blocks(page)]
COMMANDS = [(block, line) for block in [*BLOCKS, *headers()] if block.language == "sh" for line in commands(block)]

SHOWN_IN = {command: block.where for block, command in reversed(COMMANDS)}

# What takes an engine, a server, a network or an hour: command -> the tests (below tests/) that run it.
RUN_ELSEWHERE = {
    r"make demo": [
        "bench/test_bench_run.py::test_demo",
        "packaging/test_makefile.py::test_demo_passes_the_json_file_on",
    ],
    r"make (test|check|test-fast|coverage)": ["packaging/test_makefile.py::test_ci_runs_check_and_test"],
    r"make gpu-check( ARGS=--interpret)?": [
        "attention/test_gpu_check.py::test_without_a_gpu_it_says_so",
        "attention/test_gpu_check.py::test_small_cases_in_the_interpreter",
    ],
    r"make gpu-e2e( ARGS=--rehearse)?|pip install --no-deps \.": [
        "host/test_gpu_e2e.py::test_without_a_gpu_it_says_so",
        "host/test_gpu_e2e.py::test_it_rehearses_on_a_cpu",
    ],
    r"make test-long": ["host/test_request_shapes.py::test_every_shape_is_answered_as_in_plain_decoding"],
    r"make venv( VENV=\S+)?": ["packaging/test_makefile.py::test_no_python_is_one_readable_error"],
    r"vllm serve MODEL --speculative-config '\{.*\}'": ["examples/test_serve.py::test_chat"],
    r"vllm-medusa bench .*--data .*": [
        "bench/test_bench_run.py::test_bench_of_servers",
        "bench/test_bench_run.py::test_bench",
    ],
    r"vllm-medusa train .*--texts .*": ["training/test_invented_prompts.py::test_texts_are_read_whole"],
    r"vllm-medusa train .*--self-prompts .*": [
        "training/test_self_prompts.py::test_they_are_different_finished_and_as_many_as_asked"
    ],
    r"vllm-medusa train .*--(tensor-parallel-size|quantization) .*": [
        "training/test_engine_options.py::test_the_command_takes_them",
        "training/test_engine_options.py::test_what_is_given_is_handed_on",
    ],
    r"torchrun --nproc-per-node 8 -m vllm_medusa train .*": [
        "training/test_ranks.py::test_heads_are_those_of_one_process",
        "training/test_resume.py::test_one_of_two_ranks_is_killed",
    ],
    r"vllm-medusa train --model \S+ --prompts \S+ --out \S+": [
        "training/test_run.py::test_train_writes_heads_that_serve_and_say_how_good_they_are"
    ],
    r"vllm-medusa calibrate .*": ["training/test_calibrate_command.py::test_calibrate_from_the_command_line"],
    r"vllm-medusa doctor": ["test_doctor.py::test_the_self_check_serves", "test_doctor.py::test_the_whole_command"],
    r"vllm-medusa doctor --host-source DIR": ["host/test_host_source.py::test_doctor_reads_a_source"],
    r"vllm-medusa convert .* --to vllm --model MODEL": ["heads/test_conversion.py::test_ours_to_vllm_and_back"],
    r"python examples/offline_batch\.py( .*)?": ["examples/test_offline_batch.py::test_offline_batch"],
    r"python examples/train_heads\.py( .*)?": ["examples/test_train_heads.py::test_heads_for_a_model_of_ones_own"],
    r"python examples/choose_tree\.py( .*)?": ["examples/test_choose_tree.py::test_trees_are_compared"],
    r"python examples/chat_client\.py( .*)?": ["examples/test_serve.py::test_client_example"],
    r"python examples/read_metrics\.py( .*)?": ["examples/test_serve.py::test_metrics_example"],
    r"examples/serve\.sh( .*)?": ["examples/test_serve.py::test_chat"],
    r"from vllm import LLM.*": ["examples/test_offline_batch.py::test_offline_batch"],
}
# What is run here, in a folder where these names mean something.
PLACE = {"HEADS": "heads", "heads": "heads"}
RUN_HERE = (
    r"vllm-medusa inspect\b.*|python (examples/one_step|benchmarks/predict_gpu)\.py|\.venv/bin/pre-commit install"
)


def named(command: str) -> list[str]:
    return next((tests for pattern, tests in RUN_ELSEWHERE.items() if re.fullmatch(pattern, command, re.DOTALL)), [])


def our_commands() -> dict[str, click.Command]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def host_options() -> set[str]:
    """Options of `vllm serve`, read in its source: importing it takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    files = [package / "engine" / "arg_utils.py", *sorted((package / "entrypoints").rglob("*.py"))]
    return {option for file in files for option in re.findall(r'"(--[a-z][\w-]*)"', file.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with heads in it."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(bundled_heads(), folder / "heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("command", SHOWN_IN, ids=lambda command: command[:90])
def test_each_command_is_run(command: str, place: Path) -> None:
    tests = named(command)
    for test in tests:
        assert is_test(test), f"{test}, said to run {command!r}, is not there"
    if tests:
        return
    assert re.fullmatch(RUN_HERE, command), (
        f"{SHOWN_IN[command]} shows {command!r}, which no test is known to run; say so in RUN_HERE or RUN_ELSEWHERE"
    )
    words = [PLACE.get(word, word) for word in shlex.split(command)]
    if words[0] == "vllm-medusa":
        result = CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"}).invoke(app, words[1:])
        assert result.exit_code == 0, result.output
        for word in words:
            assert not word.endswith(".svg") or (place / word).is_file()
    elif words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=120)
    else:  # a tool of .venv, in a checkout of its own
        subprocess.run(["git", "init", "-q"], check=True)
        shutil.copy(ROOT / ".pre-commit-config.yaml", place)
        subprocess.run([Path(sys.executable).with_name(Path(words[0]).name), *words[1:]], check=True, timeout=120)
        assert (place / ".git" / "hooks" / "pre-commit").is_file()


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[f"{b.where} {c}"[:90] for b, c in COMMANDS])
def test_its_options_exist(block: Block, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "vllm-medusa":
        our_commands()[words[1]].make_context(words[1], words[2:])  # raises on unknown options and wrong values
    elif words[0] == "make":
        result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
    if "--speculative-config" in words:
        MedusaConfig.parse(json.loads(words[words.index("--speculative-config") + 1]))


@pytest.mark.parametrize("block", BLOCKS, ids=[block.where for block in BLOCKS])
def test_blocks_say_what_they_are(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.where}: a block of {block.language!r} is not looked at by any test"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_python_runs(page: Path) -> None:
    """Blocks of one page are one session; those that need an engine are run by the test that the table names."""
    session: dict[str, Any] = {}
    for block in blocks(page):
        if block.language != "python":
            continue
        tests = named(block.body.strip())
        if tests:
            assert all(map(is_test, tests))
            compile(block.body, block.where, "exec")
        elif ">>>" in block.body:
            runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
            parsed = parser.get_doctest(block.body, session, block.where, page.name, block.line)
            told: list[str] = []
            assert runner.run(parsed, out=told.append, clear_globs=False).failed == 0, "".join(told)
            session = parsed.globs
        else:
            exec(compile(block.body, block.where, "exec"), session)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_options_in_the_text_exist(page: Path) -> None:
    ours = {option for command in our_commands().values() for parameter in command.params for option in parameter.opts}
    ours |= {option for command in our_commands().values() for p in command.params for option in p.secondary_opts}
    ours |= host_options() | {"--help"}
    for code in inline_code(page):
        words = code.split()
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
            assert option in ours, f"{page.name} tells of {option!r}"
        if words[0] == "vllm-medusa" and len(words) > 1:
            assert words[1] in our_commands() or words[1].startswith("-"), f"{page.name} tells of {code!r}"
        if words[0] == "make" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{page.name} tells of {code!r}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_settings_in_the_text_exist(page: Path) -> None:
    """`"key": value` is a key of the speculative config, with a value that it takes."""
    for code in inline_code(page):
        match = re.fullmatch(r'"(\w+)": (true|false|"[^"]*"|\d+)', code)
        if match and match[1] != "method":
            MedusaConfig.parse({"model": "heads", match[1]: json.loads(match[2])})


def test_nothing_in_the_table_is_left_over() -> None:
    shown = {command for _, command in COMMANDS} | {b.body.strip() for b in BLOCKS if b.language == "python"}
    unused = [p for p in RUN_ELSEWHERE if not any(re.fullmatch(p, command, re.DOTALL) for command in shown)]
    assert unused == [], "no page shows these any more"
