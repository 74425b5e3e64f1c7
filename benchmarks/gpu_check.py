"""Are the GPU's kernels right, and how fast? Needs torch and triton; no vLLM, no network, nothing installed of ours.

    python benchmarks/gpu_check.py [--interpret]

First tree attention against the formula in float64 (errors at most twice those of the formula in the kernel's dtype)
and the commit against writing again; then, on a GPU, times for Llama-3-8B's shapes beside what else is there: torch,
flash-attn, xformers, a copy. The last line is JSON. The exit status is 0 if everything asked for was right, 1 if not, 2
where there is no GPU and --interpret, which runs small cases in Triton's interpreter, was not given.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def attention_cases(small: bool, float8: list[torch.dtype]) -> list[Any]:
    """What tree attention is tried on: every dtype, head size, option, block size and group, then seeds."""
    from gpu_cases import Case

    base = Case([63, 128, 0, 5], [4097, 0, 127, 700])
    if small:
        base = Case([12, 70, 0, 3], [40, 0, 17, 90], heads=(4, 2), head_size=64)
    cases = [replace(base, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    cases += [replace(base, head_size=size) for size in ((80, 256) if small else (64, 80, 96, 256))]
    if not small:
        cases += [replace(base, head_size=size, dtype=torch.float32) for size in (64, 256)]
    for options in ({"sliding_window": 30}, {"softcap": 30.0}, {"sliding_window": 100, "softcap": 5.0}):
        cases.append(replace(base, options=options))
    cases += [replace(base, block_size=size) for size in ((64,) if small else (32, 64, 128, 256))]
    cases += [replace(base, heads=heads) for heads in ((8, 8), (7, 1), (16, 1))]
    for stored in float8:
        cases.append(replace(base, stored=stored, scales=([0.5], [0.25])))
        scales = [0.1 + 0.1 * head for head in range(base.heads[1])]
        cases.append(replace(base, stored=stored, scales=(scales, scales[::-1])))
    cases.append(replace(base, back=1))
    cases += [replace(base, seed=seed) for seed in range(1, 2 if small else 20)]
    return cases


def check_attention(step: Any, splits: int | None) -> dict[str, float]:
    """The largest errors: of the kernel, of the formula in the same dtype, and what is allowed."""
    from vllm_medusa.attention.triton import tree_attention

    truth, dtype = step.formula(torch.float64), step.case.dtype
    out = step.attend(tree_attention, torch.full_like(step.query, torch.nan), splits=splits)
    naive = (step.formula(dtype).double() - truth).abs().max()
    error = (out.double() - truth).abs().max().nan_to_num(nan=torch.inf)
    unit = torch.finfo(dtype).eps / 2
    granted = 32 * unit if dtype == torch.float32 else unit * float(truth.abs().max())
    return {"error": float(error), "naive": float(naive), "allowed": max(2 * float(naive), granted)}


def check_mover(block_size: int, dtype: torch.dtype, device: str) -> bool:
    """Accepted rows of five requests move in three layers; the same as copies that are written again."""
    from vllm_medusa.attention.triton_mover import SlotMover

    paths = [[2, 3, 5, 9], [1, 2, 6, 8], [4, 5, 6, 7], [1, 2, 3, 4], [17, 33, 48, 60]]
    context, blocks = block_size - 2, 5 * (64 // block_size + 2)
    tables = torch.randperm(blocks).view(5, -1)
    caches = [torch.randn(blocks, 8, block_size, 256).to(device, dtype) for _ in range(3)]
    slots = [torch.full((5, 4), nothing) for nothing in (-1, 0)]
    for request, path in enumerate(paths):
        for depth, row in enumerate(path, start=1):
            for kept, slot in zip(slots, (context + row, context + depth), strict=True):
                if row != depth:
                    place = tables[request, slot // block_size] * block_size + slot % block_size
                    kept[request, depth - 1] = place
    sources, targets = (kept.to(device) for kept in slots)
    source, target = sources[sources >= 0], targets[sources >= 0]
    wanted = [cache.clone() for cache in caches]
    for cache, right in zip(caches, wanted, strict=True):
        right[target // block_size, :, target % block_size] = cache[source // block_size, :, source % block_size]
    SlotMover(caches).move(sources, targets)
    return all(torch.equal(cache, right) for cache, right in zip(caches, wanted, strict=True))


def check_all(device: str) -> dict[str, Any]:
    """Every case; prints one line for each that is wrong."""
    from gpu_cases import build

    small = device == "cpu"
    float8 = [torch.float8_e5m2]
    if small or torch.cuda.get_device_capability() >= (8, 9):  # Triton has no e4m3 on older ones
        float8.append(torch.float8_e4m3fn)
    wrong, worst, count = [], 0.0, 0
    for case in attention_cases(small, float8):
        step = build(case, device)
        for splits in (2,) if small else (None, 5):
            found = check_attention(step, splits)
            count += 1
            worst = max(worst, min(found["error"] / found["allowed"], 1e6))
            if not found["error"] <= found["allowed"]:
                wrong.append(f"splits={splits} {case}: {found}")
                print("WRONG", wrong[-1], flush=True)
    for block_size in (16, 64):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            count += 1
            if not check_mover(block_size, dtype, device):
                wrong.append(f"commit, blocks of {block_size}, {dtype}")
                print("WRONG", wrong[-1], flush=True)
    print(f"{count} checks, {len(wrong)} wrong, largest error {worst:.2f} of what is allowed")
    return {"checks": count, "wrong": wrong, "largest_error_of_allowed": round(worst, 3)}


def main() -> int:
    """Check, measure, and say it in one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--interpret", action="store_true", help="small cases in Triton's interpreter, on any machine")
    interpret = parser.parse_args().interpret
    sys.path.insert(0, str(ROOT))
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    if not interpret and report["gpu"] is None:
        print(
            "No GPU here: nothing was checked. --interpret checks small cases in Triton's interpreter.", file=sys.stderr
        )
        print(json.dumps({**report, "checked": False}))
        return 2
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import triton

    began = time.time()
    report |= {"checked": True, "interpreted": interpret, "torch": torch.__version__, "triton": triton.__version__}
    report |= check_all("cpu" if interpret else "cuda")
    if not interpret:
        from gpu_speed import measure

        report |= measure()
    report["seconds"] = round(time.time() - began, 1)
    print(json.dumps(report))
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
