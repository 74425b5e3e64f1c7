"""The bench and the demo with real engines, on small work."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_bench(model: str, plain_heads: Path, tmp_path: Path) -> None:
    """float32: every method gives plain vLLM's tokens; the JSON says what was done and how."""
    data = tmp_path / "two.jsonl"
    data.write_text('{"prompt": "Count from 1 to 30."}\n{"turns": ["Name five animals, one per line."]}\n')
    table = run(
        "bench", "--model", model, "--data", data, "--methods", "medusa,native-chain",
        "--native-heads", plain_heads,
        "--batch-sizes", "1,2", "--max-tokens", 24, "--rounds", 1, "--dtype", "float32", "--enforce-eager",
        "--json", "out.json", "--plot", "out.png", cwd=tmp_path,
    )  # fmt: skip
    assert "native-chain" in table
    assert (tmp_path / "out.png").exists()
    found = json.loads((tmp_path / "out.json").read_text())
    assert {(run["method"], run["batch_size"]) for run in found["runs"]} == {
        (method, size) for method in ("none", "medusa", "native-chain") for size in (1, 2)
    }
    for run_ in found["runs"]:
        assert run_["dataset"] == "two"
        assert run_["identical_to_none"] == 1.0, run_
        assert (run_["overhead_share"] is not None) == (run_["method"] == "medusa")
        assert run_["mean_accepted_length"] >= 1.0
    medusa = next(run for run in found["runs"] if run["method"] == "medusa")
    assert medusa["drafted_nodes_per_step"] > 0
    assert {ratio["method"] for ratio in found["ratios"]} == {"medusa", "native-chain"}
    assert found["provenance"]["environment"]["OMP_NUM_THREADS"]
    assert found["provenance"]["engine"]["none"]["dtype"] == "float32"


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
    assert json.loads((tmp_path / "out.json").read_text())["ratios"]
