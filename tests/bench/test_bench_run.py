"""The bench and the demo with real engines, on small work."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_llama, save_random_heads, small_tokenizer

from vllm_medusa.defaults import default_model
from vllm_medusa.errors import MedusaError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return default_model()
    except MedusaError as error:
        pytest.skip(f"no model to measure: {error}")


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random Llama with a tokenizer, and heads that vLLM's own Medusa can express, whatever they guess."""
    import torch

    folder = tmp_path_factory.mktemp("tiny-pair")
    tokenizer = small_tokenizer("count from 1 to 30, name five animals, one per line ", 320)
    tokenizer.save_pretrained(folder / "model")
    vocab = len(tokenizer)
    save_llama(folder / "model", seed=17, vocab_size=vocab, max_position_embeddings=512, eos_token_id=1, bos_token_id=0)
    torch.manual_seed(0)
    save_random_heads(folder / "heads", std=0.01, num_heads=3, num_layers=1, hidden_size=64, vocab_size=vocab)
    return folder / "model", folder / "heads"


def run(*arguments: object, cwd: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "vllm_medusa.cli", *(str(argument) for argument in arguments)]
    environment = os.environ | environment
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "two.jsonl"
    long = json.dumps({"prompt": "Count from 1 to 30, and on. " * 400})  # more than the 512 positions of the tiny model
    path.write_text(f'{{"prompt": "Count from 1 to 30."}}\n{long}\n{{"turns": ["Name five animals, one per line."]}}\n')
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
    assert found["left_out"] == {"two": 1}
    assert sum(run["drafted_nodes_per_step"] for run in found["runs"] if run["method"] == method) > 0
    assert {ratio["method"] for ratio in found["ratios"]} == {method}
    assert found["provenance"]["environment"]["OMP_NUM_THREADS"]
    for facts in found["provenance"]["engine"].values():
        assert facts["dtype"] == "float32"
        assert sum(facts["peak_resident_mib"].values()) > 200.0


def test_bench(tiny_pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """vLLM's own Medusa, our plugin off; the demo's test measures ours, on SmolLM2."""
    model, heads = tiny_pair
    table = run(
        "bench", "--model", model, "--data", data, "--methods", "native-chain", "--native-heads", heads,
        *SMALL, "--json", "out.json", "--plot", "out.png", cwd=tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )  # fmt: skip
    assert "native-chain" in table and "1 of two" in " ".join(table.split())
    told = [line for line in table.splitlines() if line.startswith("... ")]  # a pipe is no terminal
    for said in (
        "starting none: importing vLLM",
        "starting native-chain: starting the engine",
        "warming up",
        "measuring",
    ):
        assert any(said in line for line in told), told
    assert (tmp_path / "out.png").exists()
    found = json.loads((tmp_path / "out.json").read_text())
    check_runs(found, "native-chain")
    assert all(run["ttft_p50"] is None and run["overhead_share"] is None for run in found["runs"])
    assert "cost" not in found


@pytest.mark.server
def test_bench_of_servers(tiny_pair: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """The same over HTTP: latencies besides, and what the engine has learnt of the cost of a step."""
    model, heads = tiny_pair
    shown = run(
        "bench", "--server", "--model", model, "--heads", heads, "--data", data, "--methods", "medusa", "--show-cost",
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
