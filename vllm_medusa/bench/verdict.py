"""Whether trees paid, why, and what would help: the lines behind a table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from vllm_medusa.bench.results import Ratio, Results, mean
from vllm_medusa.quota import usable_cores
from vllm_medusa.row_cost import RowCost, row_cost


def verdict(results: Results, method: str = "medusa") -> Text | None:
    """What a row costs, where trees were slower than plain vLLM and why; None where the method learnt no costs."""
    cost = row_cost({int(row["tokens"]): row["milliseconds"] / 1e3 for row in results.costs.get(method, [])})
    if cost is None:
        return None
    lost = [ratio for ratio in results.ratios() if ratio.method == method and ratio.median < 1.0]
    parts = [(cost.words, "dim")]
    if lost:
        parts.append((f"\n{_why(results, method, lost, cost)}", "yellow"))
        facts = results.provenance.get("engine", {}).get(method, {})
        helps = what_would_help(facts, results.provenance.get("environment", {}))
        if helps:
            parts.append((f"\nWhat would help: {'; '.join(helps)}.", "yellow"))
    return Text.assemble(*parts)


def _why(results: Results, method: str, lost: list[Ratio], cost: RowCost) -> str:
    """Where trees did not pay, and what they brought for what they took."""
    places = ", ".join(dict.fromkeys(f"{ratio.dataset} at batch {ratio.batch_size}" for ratio in lost))
    runs = [run for ratio in lost for run in results.select(method, ratio.dataset, ratio.batch_size)]
    nodes, accepted = mean(run.drafted_nodes_per_request for run in runs), mean(r.mean_accepted_length for r in runs)
    overhead = mean(run.overhead_share or 0.0 for run in runs)
    return (
        f"Trees did not pay for {places}: {nodes:.1f} nodes a request brought {accepted - 1.0:.2f} tokens more a step, "
        f"for {nodes * cost.share:.0%} of a step's time in rows and {overhead:.0%} in drafting."
    )


def what_would_help(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """What makes rows cheaper on this machine and is not done.

    Args:
        facts: of the engine: `dtype`, `compiled`.
        environment: of its process.
    """
    import torch

    found = []
    has_compiler = any(map(shutil.which, (environment.get("CXX", "g++"), "g++", "c++")))
    if not facts.get("compiled", True):
        if not has_compiler:
            found.append("a C++ compiler (install g++ and python3-dev), so that the model can be compiled")
        else:
            found.append("compiling the model (without --enforce-eager)")
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if torch.cuda.is_available():
        return found
    if facts.get("dtype") == "float32" and (native or has_compiler):
        found.append("bfloat16, half as much to read (--dtype bfloat16)")
    if facts.get("dtype") in ("bfloat16", "float16") and not native and not has_compiler:
        found.append(
            f"a C++ compiler (install g++): this processor has no instructions for {facts['dtype']}, so vLLM's "
            "products take a time of their own for each row; ours, built on first use, does not"
        )
    threads, cores = environment.get("OMP_NUM_THREADS", ""), usable_cores()
    if threads.isdecimal() and int(threads) < cores:
        found.append(f"more threads (OMP_NUM_THREADS={cores}, now {threads})")
    return found
