"""Building the compiled kernel: whatever the machine lacks, attention still works, and says so once."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from steps import Step, random_tree
from test_attention import OPTIONS, assert_true, needs

from vllm_medusa.attention import native
from vllm_medusa.attention.cpu import active_kernel
from vllm_medusa.attention.layout import KeyLayout

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache of builds, and a loader that has not loaded yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    native.load_kernel.cache_clear()
    yield tmp_path
    native.load_kernel.cache_clear()


def still_works() -> None:
    step = Step.random([random_tree(20, 0)], [40])
    assert_true(step, step.run())
    with pytest.raises(ValueError, match="c\\+\\+"):
        step.run(kernel="c++")


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert active_kernel() == "gather"
        still_works()
    assert [record.message for record in caplog.records if "install g++" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('if [ "$1" = --version ]; then echo mine 1; else echo "no such flag" >&2; exit 1; fi', "no such flag"),
        ("exit 3", "compiler failed"),
        # A compiler that "works" but makes nonsense: the library cannot be loaded.
        (
            'if [ "$1" = --version ]; then echo mine 2; else while [ "$1" != -o ]; do shift; done; echo x > "$2"; fi',
            "so",
        ),
    ],
)
def test_with_a_broken_compiler(
    fresh: Path, script: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = fresh / "broken-g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING):
        still_works()
    assert len(caplog.records) == 1 and said in caplog.records[0].message


def test_a_cache_that_cannot_be_written(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh / "file"))
    with caplog.at_level(logging.WARNING):
        still_works()
    assert len(caplog.records) == 1


@needs_compiler
def test_builders_at_once_leave_one_whole_library(fresh: Path) -> None:
    # The smallest library: they are all built alike.
    code = "from vllm_medusa.tree import native; print(native.load() is not None)"
    command = [sys.executable, "-c", code]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) for _ in range(2)]
    said = [builder.communicate(timeout=300)[0].strip() for builder in builders]
    assert said == ["True", "True"]
    left = sorted(path.name for path in (fresh / "builds" / "vllm_medusa").iterdir())
    assert len(left) == 1 and left[0].endswith(".so")
    built = [path.stat().st_mtime_ns for path in (fresh / "builds" / "vllm_medusa").iterdir()]
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert again.stdout.strip() == "True"
    found = [path.stat().st_mtime_ns for path in (fresh / "builds" / "vllm_medusa").iterdir()]
    assert found == built, "it was built anew"


@needs_compiler
def test_there_is_one_openmp_runtime() -> None:
    """Two would each start threads for every core. torch brings its own; ours must be the same."""
    code = (
        "from vllm_medusa.attention.native import load_kernel\n"
        "assert load_kernel() is not None\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(*sorted({line.split()[-1] for line in lines if 'omp' in line.rsplit('/')[-1]}), sep='\\n')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert len(found.stdout.split()) == 1, found.stdout


@needs_compiler
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_size", [32, 128])
def test_the_portable_way_reads_what_is_packed_for_amx(block_size: int, options: dict[str, float]) -> None:
    needs("amx")
    kernel = native.load_kernel()
    assert kernel is not None
    trees = [random_tree(63, 0), random_tree(128, 1, reach_back=8)]
    step = Step.random(trees, [200, 0], dtype=torch.bfloat16, block_size=block_size)
    key_cache, value_cache, table = step.store()
    out = torch.empty_like(step.query)
    kernel.plan(step.plan(table, **options), amx=False).run(step.query, key_cache, value_cache, out)
    assert_true(step, out, **options)


@needs_compiler
def test_what_the_kernel_cannot_read_is_gathered() -> None:
    kernel = native.load_kernel()
    assert kernel is not None
    assert kernel.supports(torch.float32, KeyLayout.row_major(32, 64))
    assert not kernel.supports(torch.float64, KeyLayout.row_major(32, 64))
    assert not kernel.supports(torch.float32, KeyLayout.row_major(24, 64))
    places = torch.randperm(32 * 64).view(32, 64)
    assert not kernel.supports(torch.float32, KeyLayout(places, places))
