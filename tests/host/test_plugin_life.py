"""The plugin's life in other people's environments: beside other plugins, hidden, optimised, offline, without vLLM.

CI looks at two of them; `MEDUSA_LONG=1` starts and serves in all, half a minute each.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LONG = pytest.mark.skipif(os.environ.get("MEDUSA_LONG") != "1", reason="MEDUSA_LONG=1: half a minute each")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CHILD = "vllm_medusa.doctor.child"


def run(code: str, *flags: str, **environment: str) -> Any:
    """What the code prints last, as JSON, in an interpreter of its own."""
    known = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", *OFFLINE)}
    known |= {"VLLM_LOGGING_LEVEL": "ERROR", **environment}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=known)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def other_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on the path, is an installed distribution with a general plugin."""
    folder = tmp_path_factory.mktemp("other-plugin")
    (folder / "dummy_plugin.py").write_bytes(Path(__file__).with_name("dummy_plugin.py").read_bytes())
    facts = folder / "dummy_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\ndummy = dummy_plugin:register\n")
    return folder


CONFIGS = """
import json, os, sys
import dummy_plugin
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

def config(**speculative):
    args = EngineArgs(model=MODEL, skip_tokenizer_init=True, speculative_config=speculative or None)
    try:
        made = args.create_engine_config().speculative_config
    except ValueError as error:
        return [type(error).__name__, str(error)]
    return made and [made.method, made.model]

load_general_plugins()
if "vllm_medusa" in sys.modules:
    from vllm_medusa.plugin import register
    register(), register()
found = {
    "plain": config(),
    "ngram": config(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3),
    "medusa": config(method="medusa", model=HEADS, num_speculative_tokens=4),
    "hub": config(method="medusa", model="lab/not-here", num_speculative_tokens=4),
    "seen": len(dummy_plugin.CALLS),
    "ours": "vllm_medusa.host.patches" in sys.modules,
    "asserts": __debug__,
}
print(json.dumps(found))
"""


def configs(model: Path, heads: Path, prelude: str, *flags: str, **environment: str) -> Any:
    return run(f"MODEL, HEADS = {str(model)!r}, {str(heads)!r}\n{prelude}\n{CONFIGS}", *flags, **environment)


def check_served(found: Any) -> None:
    assert found["plain"] is None and found["ngram"] == ["ngram", "ngram"]
    assert found["medusa"] == ["custom_class", "vllm_medusa.proposer.MedusaProposer"]
    kind, message = found["hub"]
    assert kind == "MedusaError" and "HF_HUB_OFFLINE is set" in message and "\n" not in message


@pytest.mark.slow
@LONG
@pytest.mark.parametrize(("order", "flag"), [("insert(0, ", "-B"), ("append(", "-O")], ids=["first", "last"])
def test_beside_another_plugin_offline_and_registered_thrice(
    order: str, flag: str, tiny_model: Path, tiny_heads: Path, other_plugin: Path
) -> None:
    """The other one sees all that the host made, ours too; once each. And when assertions are stripped."""
    found = configs(tiny_model, tiny_heads, f"import sys; sys.path.{order}{str(other_plugin)!r})", flag, **OFFLINE)
    check_served(found)
    assert found["asserts"] == (flag != "-O") and found["ours"]
    assert found["seen"] == 3, "plain, n-gram and medusa; the hub's heads were refused before"


def test_registering_again_under_anothers_wrapper_changes_nothing(tiny_model: Path, tiny_heads: Path) -> None:
    """functools.wraps copies our mark: the patch below it is found, and not laid on twice."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_medusa.host import patches
    from vllm_medusa.plugin import register

    register()
    ours, calls = EngineArgs.create_speculative_config, []

    @functools.wraps(ours)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    EngineArgs.create_speculative_config = wrapper
    try:
        register()
        assert EngineArgs.create_speculative_config is wrapper
        medusa = {"method": "medusa", "model": str(tiny_heads), "num_speculative_tokens": 4}
        args = EngineArgs(model=str(tiny_model), skip_tokenizer_init=True, speculative_config=medusa)
        assert args.create_engine_config().speculative_config.method == "custom_class" and len(calls) == 1
        patches.uninstall()
        assert EngineArgs.create_speculative_config is wrapper  # not ours to remove
    finally:
        EngineArgs.create_speculative_config = ours
        register()


HIDDEN = """
import importlib.metadata, sys
real = importlib.metadata.entry_points
def entry_points(**asked):
    found = real(**asked)
    if not asked:
        return found
    return importlib.metadata.EntryPoints(point for point in found if not point.value.startswith("vllm_medusa"))
importlib.metadata.entry_points = entry_points
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_medusa":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Gone())
"""


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("how", ["VLLM_PLUGINS", "uninstalled"])
def test_hidden_from_vllm_or_gone(how: str, tiny_model: Path, tiny_heads: Path, other_plugin: Path) -> None:
    """Everything else is as ever. 'medusa' then means vLLM's own, which knows nothing of our settings."""
    prelude = f"import sys; sys.path.insert(0, {str(other_plugin)!r})\n" + (HIDDEN if how == "uninstalled" else "")
    plugins = {"VLLM_PLUGINS": "dummy"} if how == "VLLM_PLUGINS" else {}
    found = configs(tiny_model, tiny_heads, prelude, **OFFLINE, **plugins)
    assert found["plain"] is None and found["ngram"] == ["ngram", "ngram"] and not found["ours"]
    assert found["medusa"][0] != "custom_class" and found["hub"][0] not in ("MedusaError", "custom_class")


WITHOUT_VLLM = """
import importlib, json, sys
from pathlib import Path
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name="vllm")
sys.meta_path.insert(0, Gone())
import vllm_medusa
from typer.testing import CliRunner
from vllm_medusa.cli import app
runner, place = CliRunner(), Path(PLACE)
for part in ("tree", "heads", "attention"):
    for file in sorted((Path(vllm_medusa.__file__).parent / part).glob("[a-z]*.py")):
        importlib.import_module(f"vllm_medusa.{part}.{file.stem}")
import vllm_medusa.proposer, vllm_medusa.config, vllm_medusa.budget
def ask(*arguments):
    result = runner.invoke(app, list(arguments))
    tidy = result.exception is None or isinstance(result.exception, SystemExit)
    return [result.exit_code, result.stdout, result.stderr if tidy else repr(result.exception)]
prompts = ["--prompts", str(place / "prompts.jsonl")]
print(json.dumps({
    "help": ask("--help"),
    "inspect": ask("inspect"),
    "convert": ask("convert", str(place / "heads"), str(place / "new"), "--to", "ours"),
    "doctor": ask("doctor"),
    "calibrate": ask("calibrate", "--heads", str(place / "heads"), "--model", str(place / "target"), *prompts),
    "inspect hub": ask("inspect", "lab/not-here"),
    "convert hub": ask("convert", "lab/not-here", str(place / "new2"), "--to", "ours"),
    "calibrate hub": ask("calibrate", "--heads", "lab/not-here", "--model", str(place / "target"), *prompts),
    "calibrate hub model": ask("calibrate", "--heads", str(place / "heads"), "--model", "lab/not-here", *prompts),
    "train hub model": ask("train", "--model", "lab/not-here", "--out", str(place / "out"), *prompts),
    "doctor hub": ask("doctor", "--heads", "lab/not-here", "--model", "lab/not-here", "--no-self-check"),
}))
"""


@pytest.mark.slow
def test_commands_without_vllm_and_offline(speaker_model: Path, speaker_heads: Path, tmp_path: Path) -> None:
    """What needs no vLLM works; the rest, and what the hub would have to give, is one error each."""
    (tmp_path / "heads").symlink_to(speaker_heads)
    (tmp_path / "target").symlink_to(speaker_model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    (tmp_path / "hub").mkdir()
    said = run(f"PLACE = {str(tmp_path)!r}\n{WITHOUT_VLLM}", HF_HOME=str(tmp_path / "hub"), **OFFLINE)
    assert [said[name][0] for name in ("help", "inspect", "convert")] == [0, 0, 0], said
    status, report, _ = said.pop("doctor")
    assert status == 1 and "vLLM is not installed" in report and "left out" in report and "4 heads for" in report
    status, report, _ = said.pop("doctor hub")
    assert status == 1 and "model='lab/not-here'" in report
    for name in ("calibrate", "inspect hub", "convert hub", "calibrate hub", "calibrate hub model", "train hub model"):
        status, output, error = said[name]
        assert status == 1 and output.strip() == "" and len(error.splitlines()) == 1, (name, said[name])
        assert ("pip install" if name == "calibrate" else "HF_HUB_OFFLINE is set") in error, (name, error)


def answer_of(folder: Path, *flags: str, prelude: str = "", **environment: str) -> Any:
    """What the self-check's process finds when it runs so."""
    (folder / "task.json").write_text(json.dumps({"model": None, "heads": None}))
    code = f"{prelude}\nimport runpy, sys\nsys.argv = ['child', {str(folder)!r}]\nif __name__ == '__main__':\n"
    script = folder / "run.py"
    script.write_text(code + f"    runpy.run_module({CHILD!r}, run_name='__main__')\n")
    known = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", *OFFLINE)}
    known |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", **environment}
    command = [sys.executable, *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=known)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())


WORLDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "spawned workers": ((), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}),
    "forked workers": ((), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}),
    "optimised": (("-O",), {}),
    "offline": ((), OFFLINE),
    "another plugin first": ((), {"FIRST": "1"}),
    "another plugin last": ((), {"LAST": "1"}),
    "only ours": ((), {"VLLM_PLUGINS": "medusa"}),
}


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("name", WORLDS)
def test_trees_are_served(name: str, tmp_path: Path, other_plugin: Path) -> None:
    """The self-check's tiny model, plain and with trees: the same tokens, several a step."""
    flags, environment = WORLDS[name]
    place = {"FIRST": "insert(0, ", "LAST": "append("}.get(next(iter(environment), ""))
    prelude = "" if place is None else f"import sys; sys.path.{place}{str(other_plugin)!r})"
    found = answer_of(tmp_path, *flags, prelude=prelude, **environment)
    assert "error" not in found, found
    assert found["plain"] == found["trees"] and found["mean_accepted_length"] > 2.0


@pytest.mark.slow
@LONG
def test_hidden_from_vllm_the_self_check_says_so(tmp_path: Path) -> None:
    """vLLM's own Medusa refuses the heads or serves them as a chain: either is told, none is taken for ours."""
    found = answer_of(tmp_path, VLLM_PLUGINS="other")
    assert "error" in found and "trees" not in found
