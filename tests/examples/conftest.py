"""Running the examples as their readers do: in processes of their own, from the checkout."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, free_port, served

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
    port, log = free_port(), Path(tempfile.mkstemp(prefix="vllm-medusa-serve-", suffix=".log")[1])
    command = [repository / "examples" / "serve.sh", str(port), "--enforce-eager"]
    with served(command, {**environment, "VLLM_LOG_STATS_INTERVAL": "2"}, port, log, START_SECONDS) as running:
        yield running
    log.unlink()
