"""A `vllm serve` that runs as a process of its own, seen from a test."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest


@dataclass
class Server:
    """A running server and what it has logged."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[psutil.Process]:
        """The server's process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def engine_process(self) -> psutil.Process:
        """The process of the engine core."""
        found = [process for process in self.family() if "EngineCore" in "".join(process.cmdline())]
        assert len(found) == 1, [process.cmdline() for process in self.family()]
        return found[0]

    def memory(self) -> int:
        """Bytes that the family holds, shared pages counted once."""
        return sum(process.memory_full_info().pss for process in self.family())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def samples(self, name: str, label: str) -> dict[str, float]:
        """A metric's values, summed over all labels but this one."""
        totals: dict[str, float] = defaultdict(float)
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + "{"):
                found = re.search(rf'{label}="([^"]*)"', line)
                totals[found.group(1) if found else ""] += float(line.split()[-1])
        return totals

    def running(self) -> float:
        """Requests that the engine has, waiting ones too."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(sum(self.samples(name, "engine").values()) for name in names)

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Until no request runs or waits."""
        end = time.monotonic() + seconds
        while self.running():
            assert time.monotonic() < end, "requests are left in the engine"
            time.sleep(0.2)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def served(
    command: Sequence[str | Path], environment: Mapping[str, str], port: int, log: Path, start_seconds: float
) -> Iterator[Server]:
    """Run a server by `command`, which has it listen on `port`, until it is left; killed, whatever happens."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, port, log)
    family: list[psutil.Process] = []
    try:
        _wait_until_healthy(server, start_seconds)
        family = server.family()
        yield server
    finally:
        if process.poll() is None:
            family += server.family()
        for member in family:
            if member.is_running():
                member.kill()
        process.wait()


def _wait_until_healthy(server: Server, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server did not come up:\n{server.log.read_text(errors='replace')[-4000:]}")
