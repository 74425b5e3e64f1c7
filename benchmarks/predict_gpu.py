"""Predicted speed of Llama-3-8B on GPUs, from counted bytes and operations: the tables of docs/gpu.md.

    python benchmarks/predict_gpu.py [--write]

How they are computed: gpu_step.py, beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_step import (
    A100_40GB,
    BASE,
    GPUS,
    HEAD_SIZE,
    HEADS,
    ITEM,
    KV_HEADS,
    NUM_HEADS,
    SMALL_KERNELS,
    Gpu,
    accuracies,
    draft_parts,
    kept_bytes,
    predict,
    step_parts,
    step_seconds,
)

from vllm_medusa.defaults import bundled_heads
from vllm_medusa.tree.growth import grow_static
from vllm_medusa.tree.topology import Tree

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
BATCHES, FEW = (1, 2, 4, 8, 16, 32, 64, 128), (1, 8, 32, 128)
CONTEXT, LONG_CONTEXT = 1024, 8192
MEMORY_SHARE = 0.9  # of the GPU's memory, vLLM's default


def long_speedup(gpu: Gpu, batch: int) -> str:
    """The speed-up with long texts; a dash where weights, heads and KV do not lie in the GPU's memory together."""
    cell = predict(gpu, batch, LONG_CONTEXT)
    kept = kept_bytes(batch, LONG_CONTEXT + 1 + cell.nodes)
    return f"{cell.speedup:.2f}" if kept <= MEMORY_SHARE * gpu.memory else "–"


# What changes if an assumption does: (words, assumptions).
CHANGES = (
    ("as above", BASE),
    ("memory and arithmetic do not overlap", replace(BASE, overlap=False)),
    ("45 % of peak instead of 60 %", replace(BASE, peak_share=0.45)),
    ("5 µs for each small kernel instead of 2.5 µs", replace(BASE, extra=SMALL_KERNELS * 5e-6)),
    ("the small kernels in one CUDA graph, at 1 µs", replace(BASE, extra=SMALL_KERNELS * 1e-6)),
    ("every candidate right 20 % less often", replace(BASE, skill=0.8)),
    ("an unembedding for each head", replace(BASE, unembeddings=NUM_HEADS)),
    ("heads guess among 32,768 tokens, as well", replace(BASE, draft_vocab=32768)),
    ("63 nodes whatever they cost", replace(BASE, fixed_nodes=63)),
)
# Plain vLLM as others measured it: (who, GPU, requests at a time, milliseconds per token).
SWEEP = "[sweep](https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on), vLLM 0.23"
BENCH = "[InferenceBench](https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/), vLLM 0.21"
PUBLISHED = [
    (SWEEP, A100_40GB, 1, 13.3),
    *((BENCH, GPUS[1], n, told) for n, told in ((1, 6.48), (4, 6.59), (16, 10.94))),
]
# Our bundled heads' mean accepted length on held-out answers, replayed (their card): by nodes, 0 for the chain of 4.
REPLAYED = {0: 1.81, 8: 2.09, 16: 2.23, 63: 2.53}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def accuracy_tables() -> Iterator[str]:
    """How often heads are right, and what that makes of trees: as replayed, and as predicted."""
    rows = [[str(head), *(f"{gain:.3f}" for gain in row)] for head, row in enumerate(accuracies(), start=1)]
    yield table(["head", *(f"candidate {rank}" for rank in range(1, 6))], rows)
    config = json.loads((bundled_heads() / "config.json").read_text(encoding="utf-8"))
    measured = config["calibration"]["rank_accuracy"]
    trees = [grow_static(measured, nodes) if nodes else Tree.chain(4) for nodes in REPLAYED]
    predicted = [f"{1 + sum(tree.reach(measured)):.2f}" for tree in trees]
    header = [f"{nodes} nodes" if nodes else "chain of 4" for nodes in REPLAYED]
    replayed = [f"{told:.2f}" for told in REPLAYED.values()]
    yield table(["tokens a step, bundled heads", *header], [["replayed", *replayed], ["predicted", *predicted]])


def time_tables() -> Iterator[str]:
    """What is counted, and what that makes of plain vLLM: as published, and as predicted."""
    parts = {f"{name}, 1 row": part for name, part in step_parts(1, 1, CONTEXT).items()}
    parts |= {f"{name}, 64 rows": part for name, part in step_parts(1, 64, CONTEXT).items()}
    parts |= draft_parts(BASE, 1)
    rows = [[name, f"{moved / 1e6:,.1f}", f"{work / 1e9:,.1f}"] for name, (moved, work) in parts.items()]
    yield table(["part, one request of 1,024 tokens", "MB moved", "billion operations"], rows)
    rows = [
        [who, gpu.name, str(batch), f"{told:.2f}", f"{1e3 * step_seconds(gpu, BASE, batch, batch, CONTEXT):.2f}"]
        for who, gpu, batch, told in PUBLISHED
    ]
    yield table(["plain vLLM, measured by", "GPU", "requests", "published ms", "predicted ms"], rows)


def attention_table() -> str:
    """How much of a GPU's bandwidth tree attention can reach before its arithmetic is the limit."""
    rows = []
    for count in (1, 8, 16, 32, 64):
        work = 4 * count * HEADS * HEAD_SIZE / (2 * KV_HEADS * HEAD_SIZE * ITEM)
        shares = (min(1.0, BASE.peak_share * gpu.peak / gpu.bandwidth / work) for gpu in GPUS)
        rows.append([str(count), f"{work:.0f}", *(f"{share:.2f}" for share in shares)])
    return table(["rows of a request", "operations per byte of keys and values", *(gpu.name for gpu in GPUS)], rows)


def speed_tables() -> Iterator[str]:
    """One for each GPU, one of longer texts, one of other assumptions."""
    for gpu in GPUS:
        rows = [
            f"{c.batch} {1e3 * c.plain:.2f} {c.batch / c.plain:,.0f} {c.nodes:.1f} {c.accepted:.2f} {1e3 * c.step:.2f}"
            f" {c.batch * c.accepted / c.step:,.0f} {c.speedup:.2f}".split()
            for c in (predict(gpu, batch, CONTEXT) for batch in BATCHES)
        ]
        columns = ["plain ms", "tokens/s", "nodes", "tokens a step", "Medusa ms", "tokens/s", "speed-up"]
        yield table([f"{gpu.name}: requests", *columns], rows)
    rows = [[gpu.name, *(long_speedup(gpu, batch) for batch in BATCHES)] for gpu in GPUS]
    yield table(["8,192 tokens each; requests:", *map(str, BATCHES)], rows)
    rows = [[what, *(f"{predict(GPUS[1], b, CONTEXT, assumed).speedup:.2f}" for b in FEW)] for what, assumed in CHANGES]
    yield table(["H100 SXM, 1,024 tokens each; requests:", *map(str, FEW)], rows)


def main() -> None:
    """Print every table, or put each in place of the one with its header in docs/gpu.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md")
    write = parser.parse_args().write
    text = PAGE.read_text(encoding="utf-8")
    for shown in (*accuracy_tables(), *time_tables(), attention_table(), *speed_tables()):
        if write:
            header = re.escape(shown.partition("\n")[0])
            text, found = re.subn(rf"^{header}(\n\|.*)*", lambda _, new=shown: new, text, flags=re.MULTILINE)
            assert found == 1, header
        else:
            print(f"{shown}\n")
    if write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
