"""The GPU kernels become machine code for an A100 and an H100, which needs no GPU; registers and memory suffice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_medusa.attention import triton_kernels, triton_mover
from vllm_medusa.attention.triton import Tiles

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have, CUDA C++ Programming Guide, table of limits
ALIGNED = re.compile(r"(?:key|value)_(?:block|head|token)|(?:query|out)_(?:row|head)|(?:block|head|token)_stride")

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no CUDA tools")


def build(
    kernel: triton.JITFunction,
    architecture: int,
    pointers: dict[str, str],
    values: dict[str, object],
    tiles: Tiles,
    folder: Path,
) -> dict[str, int]:
    """Registers (REG), spilt bytes (STACK) of a thread, shared memory (SHARED) of a program, as the assembler tells.

    Args:
        pointers: what each pointer argument points to; other arguments are int32, `scale` and `softcap` float32.
        values: constants; strides of 1 and of multiples of 16 are what Triton takes them for when it serves.
    """
    values |= {name: 1 for name in kernel.arg_names if name.endswith(("_dim", "content_stride"))}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        number = "fp32" if name in ("scale", "softcap") else "i32"
        signature[name] = "constexpr" if name in values else f"*{pointers[name]}" if name.endswith("_at") else number
        if name.endswith("_at") or ALIGNED.fullmatch(name):
            attributes[(place,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    program = folder / "kernel.cubin"
    program.write_bytes(compiled.asm["cubin"])
    told = subprocess.run([CUOBJDUMP, "-res-usage", program], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", told)}
    return {**used, "SHARED": compiled.metadata.shared}


@pytest.mark.parametrize(
    ("architecture", "query", "cache", "size", "rows", "extra"),
    [
        (90, "bf16", "bf16", 128, 64, {}),
        (90, "bf16", "fp8e4nv", 128, 64, {"KEY_SCALES": 8, "VALUE_SCALES": 8}),
        (90, "bf16", "bf16", 256, 129, {"WORDS": 2, "WINDOW": True, "SOFTCAP": True}),
        (80, "fp16", "fp16", 80, 64, {"SPLITS": 1}),
        (90, "bf16", "bf16", 64, 64, {"SPLITS": 1, "SINKS": True, "WINDOW": True}),
        (80, "bf16", "bf16", 128, 129, {"WORDS": 2, "WINDOW": True, "SOFTCAP": True}),
        (80, "fp32", "fp32", 128, 64, {}),
    ],
)
def test_attention(
    architecture: int, query: str, cache: str, size: int, rows: int, extra: dict[str, int], tmp_path: Path
) -> None:
    tiles = Tiles.choose(4 * rows, size, 4 if query == "fp32" else 2)
    values = {
        **{
            "KEY_SCALES": 0,
            "VALUE_SCALES": 0,
            "SINKS": False,
            "GROUP": 4,
            "SIZE": size,
            "PADDED": triton.next_power_of_2(size),
        },
        **{"BLOCK": 16, "WORDS": 1, "SPLITS": 8, "SOFTCAP": False, "WINDOW": False, "WIDE": False},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys},
        **extra,
    }
    partial = "fp32" if values["SPLITS"] > 1 else query
    pointers = {
        **{"query_at": query, "key_at": cache, "value_at": cache, "out_at": partial, "lse_at": partial},
        **{"table_at": "i32", "context_at": "i32", "start_at": "i32", "depth_at": "i32", "bits_at": "i64"},
        "sinks_at": query,
        **{name: "fp32" if extra.get("KEY_SCALES") else query for name in ("key_scale_at", "value_scale_at")},
    }
    used = build(triton_kernels.attend, architecture, pointers, values, tiles, tmp_path)
    assert used["STACK"] <= (512 if query == "fp32" else 128), used
    assert used["SHARED"] <= SHARED[architecture], used


def test_merge(tmp_path: Path) -> None:
    values = {"SINKS": True, "SIZE": 128, "PADDED": 128, "SPLITS": 32, "WIDTH": 32, "ROWS": 16, "WIDE": False}
    pointers = {"sums_at": "fp32", "lse_at": "fp32", "out_at": "bf16", "start_at": "i32", "sinks_at": "bf16"}
    used = build(triton_kernels.merge, 90, pointers, values, Tiles(16, 16, 4), tmp_path)
    assert used["STACK"] == 0, used


def test_mover(tmp_path: Path) -> None:
    values = {"BLOCK": 16, "CONTENT": 256, "PADDED": 256, "HEADS": 8, "BITS": triton.language.int16}
    pointers = {"addresses_at": "i64", "sources_at": "i64", "targets_at": "i64"}
    used = build(triton_mover._move, 90, pointers, values, Tiles(16, 16, 4), tmp_path)
    assert used["STACK"] == 0, used
