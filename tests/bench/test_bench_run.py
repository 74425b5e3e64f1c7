"""The bench and the demo with real engines, on small work."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_medusa.defaults import bundled_heads, default_model
from vllm_medusa.errors import MedusaError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return default_model()
    except MedusaError as error:
        pytest.skip(f"no model to measure: {error}")


@pytest.fixture(scope="module")
def plain_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of SmolLM2's sizes that vLLM's own Medusa can express; what they guess does not matter here."""
    import torch

    from vllm_medusa.heads.checkpoint import read_config, save_heads
    from vllm_medusa.heads.config import HeadsConfig
    from vllm_medusa.heads.model import MedusaHeads

    sizes = read_config(bundled_heads())
    torch.manual_seed(0)
    heads = MedusaHeads(
        HeadsConfig(num_heads=3, num_layers=1, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.01)
    folder = tmp_path_factory.mktemp("plain-heads")
    save_heads(heads, folder)
    return folder


def run(*arguments: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "vllm_medusa.cli", *(str(argument) for argument in arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "two.jsonl"
    path.write_text('{"prompt": "Count from 1 to 30."}\n{"turns": ["Name five animals, one per line."]}\n')
    return path


SMALL = ("--batch-sizes", "1,2", "--max-tokens", 24, "--rounds", 1, "--dtype", "float32", "--enforce-eager")


def check_runs(found: dict[str, Any], method: str) -> None:
    """What every bench promises: each method at each size, plain vLLM's tokens in float32, where it was measured."""
    assert {(run["method"], run["batch_size"]) for run in found["runs"]} == {
        (name, size) for name in ("none", method) for size in (1, 2)
    }
    for run_ in found["runs"]:
        assert run_["dataset"] == "two"
        assert run_["identical_to_none"] == 1.0, run_
        assert run_["prompts"] == 2 and 2 <= run_["output_tokens"] <= 48 and run_["steps"] > 0
        assert run_["mean_accepted_length"] >= 1.0
    # On a busy machine trees may find at one size that nodes do not pay.
    assert sum(run["drafted_nodes_per_step"] for run in found["runs"] if run["method"] == method) > 0
    assert {ratio["method"] for ratio in found["ratios"]} == {method}
    assert found["provenance"]["environment"]["OMP_NUM_THREADS"]
    for facts in found["provenance"]["engine"].values():
        assert facts["dtype"] == "float32"
        assert sum(facts["peak_resident_mib"].values()) > 200.0


def test_bench(model: str, plain_heads: Path, data: Path, tmp_path: Path) -> None:
    """vLLM's own Medusa, our plugin off; the demo's test measures ours."""
    table = run(
        "bench", "--model", model, "--data", data, "--methods", "native-chain", "--native-heads", plain_heads,
        *SMALL, "--json", "out.json", "--plot", "out.png", cwd=tmp_path,
    )  # fmt: skip
    assert "native-chain" in table
    assert (tmp_path / "out.png").exists()
    found = json.loads((tmp_path / "out.json").read_text())
    check_runs(found, "native-chain")
    assert all(run["ttft_p50"] is None and run["overhead_share"] is None for run in found["runs"])
    assert "cost" not in found


@pytest.mark.server
def test_bench_of_servers(model: str, data: Path, tmp_path: Path) -> None:
    """The same over HTTP: latencies besides, and what the engine has learnt of the cost of a step."""
    shown = run(
        "bench", "--server", "--model", model, "--data", data, "--methods", "medusa", "--show-cost",
        *SMALL, "--json", "out.json", cwd=tmp_path,
    )  # fmt: skip
    assert "ttft p50" in shown and "break-even" in shown
    found = json.loads((tmp_path / "out.json").read_text())
    check_runs(found, "medusa")
    for run_ in found["runs"]:
        assert 0.0 < run_["itl_p50"] <= run_["itl_p99"] < run_["seconds"]
        assert 0.0 < run_["ttft_p50"] <= run_["ttft_p99"] < run_["seconds"]
        assert (run_["overhead_share"] is not None) == (run_["method"] == "medusa")
        assert run_["mean_accepted_length"] == 1.0 or run_["method"] == "medusa"
    assert [row["batch_size"] for row in found["cost"]["medusa"]["nodes"]] == [1, 2]
    assert all(row["milliseconds"] > 0 for row in found["cost"]["medusa"]["steps"])


def test_demo(model: str, tmp_path: Path) -> None:
    """A table with all kinds of prompts, a tree, and the summary as the last line."""
    shown = run(
        "demo",
        "--model",
        model,
        "--max-tokens",
        24,
        "--rounds",
        1,
        "--dtype",
        "float32",
        "--json",
        "out.json",
        cwd=tmp_path,
    )
    assert all(kind in shown for kind in ("chat", "code", "math"))
    assert "──" in shown
    assert shown.strip().splitlines()[-1].startswith("Medusa trees: ")
    assert "100.0% identical tokens" in shown.replace("\n", " ")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ratios"]
    for run_ in found["runs"]:
        assert (run_["overhead_share"] is not None) == (run_["method"] == "medusa")
