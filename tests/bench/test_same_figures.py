"""What the bench says of a run is what the engine itself says of it: one definition (docs/metrics.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_llama import save_llama, save_random_heads, small_tokenizer

from vllm_medusa.bench.driver import Driver
from vllm_medusa.bench.results import measure

pytestmark = pytest.mark.slow
WORDS = "the numbers go up and down and up again, one by one, two by two "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random Llama with a tokenizer, and random heads: texts that repeat themselves are looked up all the same."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = small_tokenizer(WORDS, 320)
    tokenizer.save_pretrained(folder / "model")
    vocab = len(tokenizer)
    save_llama(folder / "model", seed=3, vocab_size=vocab, max_position_embeddings=512, eos_token_id=1, bos_token_id=0)
    torch.manual_seed(0)
    save_random_heads(folder / "heads", std=0.01, num_heads=3, num_layers=1, hidden_size=64, vocab_size=vocab)
    return folder / "model", folder / "heads"


def test_mean_accepted_length(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model, heads = pair
    engine = {
        "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
        "enable_prefix_caching": False, "seed": 0,
        "speculative_config": {
            "method": "medusa", "model": str(heads), "tree": "dynamic", "num_speculative_tokens": 12, "adaptive": False
        },
    }  # fmt: skip
    driver = Driver(engine, lambda event, **data: None)
    prompts = [WORDS[number : number + 40] for number in range(5)]
    sampling = {"temperature": 0.0, "max_tokens": 80}
    found = driver.run(prompts, 2, sampling)
    report = found.report
    assert report is not None
    run = measure(
        json.loads(json.dumps(vars(found))), found.outputs, method="medusa", dataset="words", batch_size=2,
        temperature=0.0, round=0,
    )  # fmt: skip
    assert run.request_steps == pytest.approx(report["request_steps"])
    assert run.output_tokens - run.prompts == report["emitted_tokens"]
    assert run.mean_accepted_length == pytest.approx(report["mean_accepted_length"]) and run.mean_accepted_length > 1.02
    assert run.drafted_nodes_per_request == pytest.approx(report["drafted_nodes"] / report["request_steps"])
