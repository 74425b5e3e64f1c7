"""Running the examples as their readers do: in processes of their own, from the checkout."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from served import Server

from vllm_medusa.bench.peers import shared_environment
from vllm_medusa.defaults import default_model
from vllm_medusa.errors import MedusaError

START_SECONDS = 600  # generous: the machine may be busy and the model has to be compiled first


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of the examples: default model at hand, this interpreter first on the path."""
    try:
        model = default_model()
    except MedusaError as error:
        pytest.skip(f"no model to run the examples with: {error}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **shared_environment(), "VLLM_MEDUSA_MODEL": model, "PATH": path}


@pytest.fixture(scope="module")
def server(repository: Path, environment: dict[str, str]) -> Iterator[Server]:
    """examples/serve.sh on a free port, ended and looked after whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(tempfile.mkstemp(prefix="vllm-medusa-serve-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [repository / "examples" / "serve.sh", str(port), "--enforce-eager"],
            env={**environment, "VLLM_LOG_STATS_INTERVAL": "2"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    running = Server(process, port, log)
    family: list[psutil.Process] = []
    try:
        _wait_until_healthy(running)
        family = running.family()
        yield running
    finally:
        if process.poll() is None:
            family += running.family()
        for member in family:
            if member.is_running():
                member.kill()
        process.wait()
    log.unlink()


def _wait_until_healthy(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.process.poll() is not None:
            break
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    pytest.fail(f"the server did not come up:\n{server.log.read_text(errors='replace')[-4000:]}")
