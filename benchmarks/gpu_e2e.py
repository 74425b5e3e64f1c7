"""Serve a model on a GPU plain and with trees, compare the tokens, then the speed; the last line is JSON.

Needs vLLM with CUDA and this package installed (pip install --no-deps . in a clone). First float32, where a token that
differs is a fault: eager and in CUDA graphs, greedy and sampled with seeds. Then as users serve, in alternated runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.bench.demo import demo_datasets
from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.peers import BASELINE, choose_peers, peer_environment, speculative_config
from vllm_medusa.bench.progress import BenchProgress
from vllm_medusa.bench.prompts import Dataset, read_datasets
from vllm_medusa.bench.report import table
from vllm_medusa.bench.run import Settings, run_bench
from vllm_medusa.defaults import Chosen, resolve

SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}


def compare_tokens(
    pair: Chosen, prompts: Sequence[str], *, on_gpu: bool, max_tokens: int, max_model_len: int
) -> dict[str, list[int]]:
    """Answers that are the same token for token, of how many: by kind of engine and of sampling.

    FlashAttention does not know float32, so the host's Triton attention stands beside our kernel here.
    """
    plain, medusa = choose_peers([BASELINE, "medusa"])
    shared: dict[str, Any] = {
        "model": pair.model, "dtype": "float32", "enforce_eager": True, "max_model_len": max_model_len,
        "max_num_seqs": 8, "enable_prefix_caching": False, "seed": 0,
    }  # fmt: skip
    trees: dict[str, Any] = {**shared, "speculative_config": speculative_config(medusa, pair.heads, None, None)}
    kinds = {"plain": (plain, shared), "eager": (medusa, trees)}
    if on_gpu:
        kinds["graphs"] = (medusa, {**trees, "enforce_eager": False})
        for _, engine in kinds.values():
            engine |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.28}
    same = {}
    with ExitStack() as stack:
        engines = {}
        for name, (peer, engine) in kinds.items():
            print(f"starting {name}, float32", flush=True)
            started = stack.enter_context(Engine(name, engine, environment=peer_environment(peer)))
            engines[name] = started.wait_until_ready()
        for how, asked in SAMPLING.items():
            said = {
                name: engine.run(prompts, batch_size=8, sampling=asked | {"max_tokens": max_tokens})["outputs"]
                for name, engine in engines.items()
            }
            for name in list(kinds)[1:]:
                equal = sum(a == b for a, b in zip(said["plain"], said[name], strict=True))
                same[f"{name}, {how}"] = [equal, len(prompts)]
                print(f"{name}, {how}: {equal} of {len(prompts)} answers are plain vLLM's", flush=True)
    return same


def compare_speed(
    pair: Chosen, datasets: Sequence[Dataset], batch_sizes: Sequence[int], **lengths: int
) -> list[dict[str, Any]]:
    """Medusa's tokens a second over plain vLLM's in the same round, and tokens a step, by data and batch size."""
    settings = Settings(pair.model, pair.heads, batch_sizes=tuple(batch_sizes), **lengths)
    console = Console(stderr=True)
    with BenchProgress(console) as progress:
        results = run_bench(choose_peers([BASELINE, "medusa"]), datasets, settings, progress)
    console.print(table(results))
    trees = [run for run in results.runs if run.method != BASELINE]
    tokens = {(run.dataset, run.batch_size): round(run.mean_accepted_length, 2) for run in trees}
    return [
        {
            "data": ratio.dataset,
            "batch": ratio.batch_size,
            "ratio": round(ratio.median, 3),
            "tokens_a_step": tokens[ratio.dataset, ratio.batch_size],
        }
        for ratio in results.ratios()
    ]


def main() -> int:
    """Compare tokens, then speed, and say it in one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; without it SmolLM2-135M-Instruct")
    parser.add_argument("--heads", help="folder or hub id; without it the bundled heads, for SmolLM2")
    parser.add_argument("--data", type=Path, action="append", default=[], help=".jsonl with prompts; may be repeated")
    parser.add_argument("--prompts", type=int, default=16, help="of each file (default 16)")
    parser.add_argument("--batch-sizes", default="1,8,32", help="for the speed (default 1,8,32)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default 128)")
    parser.add_argument("--max-model-len", type=int, default=2048, help="prompt and answer (default 2048)")
    parser.add_argument("--rehearse", action="store_true", help="compare tokens on a CPU; proves no GPU")
    asked = parser.parse_args()
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report: dict[str, Any] = {"gpu": gpu}
    if gpu is None and not asked.rehearse:
        print("No GPU here: nothing was compared. --rehearse compares tokens on a CPU.", file=sys.stderr)
        print(json.dumps({**report, "ok": False}))
        return 2
    if not any(point.name == "medusa" for point in entry_points(group="vllm.general_plugins")):
        print("vllm-medusa is not installed here: pip install --no-deps . in this clone", file=sys.stderr)
        print(json.dumps({**report, "ok": False}))
        return 2
    pair = resolve(asked.model, asked.heads)
    datasets = read_datasets(asked.data, asked.prompts) if asked.data else demo_datasets()
    prompts = [prompt for dataset in datasets for prompt in dataset.prompts]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    lengths = {"max_tokens": asked.max_tokens, "max_model_len": asked.max_model_len}
    report["same_tokens"] = compare_tokens(pair, prompts, on_gpu=gpu is not None, **lengths)
    report["ok"] = all(equal == of for equal, of in report["same_tokens"].values())
    if gpu is not None:
        sizes = [int(size) for size in asked.batch_sizes.split(",")]
        report["speed"] = compare_speed(pair, datasets, sizes, **lengths)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
