"""Engines as child processes, with a stand-in of a few lines for vLLM: they start, answer, fail and end."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_medusa.bench.memory import peaks_of_session
from vllm_medusa.bench.process import EngineProcess, Progress, ignore, root_cause
from vllm_medusa.errors import MedusaError

CHILD = """
import subprocess, sys
from vllm_medusa.bench.child import serve_parent
from vllm_medusa.errors import MedusaError

def work(commands, say):
    kept = commands.get()
    helper = subprocess.Popen(["sleep", "600"])
    say("stage", text="working")
    if "log" in kept:
        print(kept["log"], flush=True)
    if kept.get("fail") == "medusa":
        raise MedusaError("medusa: tree='oak': no such tree")
    if kept.get("fail"):
        raise RuntimeError(kept["fail"])
    if kept.get("quit"):
        return
    say("result", value=kept if "echo" in kept else helper.pid)
    while (command := commands.get()) is not None:
        say("result", value=command)

if __name__ == "__main__":
    serve_parent(work)
"""


class Stub(EngineProcess):
    module = "stand_in"

    def wait_until_ready(self, progress: Progress = ignore) -> "Stub":
        self.helper = self._result(progress)
        return self

    def run(
        self, prompts: Sequence[str], *, batch_size: int, sampling: Mapping[str, Any], progress: Progress = ignore
    ) -> dict[str, Any]:
        self._send({"prompts": list(prompts)})
        return dict(self._result(progress))

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        return []

    def decode(self, tokens: Sequence[int]) -> list[str]:
        return []

    @property
    def pid(self) -> int:
        return self._process.pid


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stand_in.py").write_text(CHILD)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


@pytest.fixture
def stub(environment: dict[str, str]) -> Iterator[Stub]:
    with Stub("stub", {}, environment=environment) as engine:
        yield engine.wait_until_ready()


def gone(pid: int) -> bool:
    """Whether the process ends within five seconds; one that nobody has waited for counts as ended."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_it_answers_and_leaves_nothing(stub: Stub) -> None:
    assert stub.run(["a"], batch_size=1, sampling={}) == {"prompts": ["a"]}
    stub.stop()
    assert gone(stub.pid) and gone(stub.helper)
    assert not stub.log.exists()
    stub.stop()  # twice is safe


def test_a_folder_for_exported_heads_while_it_lives(environment: dict[str, str]) -> None:
    with Stub("stub", {"echo": True}, environment=environment, export_heads=True) as engine:
        folder = Path(engine.wait_until_ready().helper["export_to"])
        assert folder.is_dir()
    assert not folder.exists()


def test_it_ends_with_its_parent(stub: Stub) -> None:
    """All that the child sees of a killed parent is the end of its input."""
    assert stub._process.stdin is not None
    stub._process.stdin.close()
    assert gone(stub.pid) and gone(stub.helper)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads Linux's /proc")
def test_peaks_of_all_its_processes(stub: Stub) -> None:
    peaks = stub.peak_resident_mib()
    assert set(peaks) == {"front end", "helpers"}
    assert peaks["front end"] > 5.0
    assert peaks_of_session(0, Path("/nowhere")) == {}


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ({"fail": "it broke"}, "RuntimeError: it broke"),
        ({"fail": "Engine core initialization failed", "log": "ValueError: no memory"}, "ValueError: no memory"),
        ({"quit": True, "log": "OSError: port taken"}, "OSError: port taken"),
        ({"quit": True}, "ended without a word"),
    ],
)
def test_failures_name_cause_and_log(environment: dict[str, str], first: dict[str, Any], says: str) -> None:
    with Stub("stub", first, environment=environment) as engine, pytest.raises(MedusaError) as caught:
        engine.wait_until_ready()
    assert says in str(caught.value)
    assert str(engine.log) in str(caught.value)
    assert engine.log.exists()  # kept for its reader
    engine.log.unlink()


def test_our_own_errors_pass_as_they_are(environment: dict[str, str]) -> None:
    with Stub("stub", {"fail": "medusa"}, environment=environment) as engine, pytest.raises(MedusaError) as caught:
        engine.wait_until_ready()
    assert str(caught.value) == "medusa: tree='oak': no such tree"


def test_root_cause_is_the_first_exception() -> None:
    log = (
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1:] Traceback (most recent call last):\n"
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1]   File 'x.py'\n"
        "(EngineCore pid=12) ERROR 11-30 03:00:00 [core.py:1] my.errors.MedusaError: medusa: tree=[]: give one\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "my.errors.MedusaError: medusa: tree=[]: give one"
    assert root_cause("INFO all is well") is None
