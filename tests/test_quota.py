"""Quotas of containers: read from files laid out as Linux lays them out, and obeyed by doctor and bench."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_medusa import quota
from vllm_medusa.bench.peers import shared_environment
from vllm_medusa.doctor import machine
from vllm_medusa.quota import Memory, limited_memory, usable_cores, usable_memory

AFFINE = len(os.sched_getaffinity(0))
GIB = 2**30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(root: Path, group: str = "/") -> Path:
    """Version 2, in which this process belongs to `group`."""
    return lay(root, {"proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": f"0::{group}\n"})


@pytest.mark.parametrize(
    ("written", "cores"), [("max 100000", AFFINE), ("150000 100000", 1), ("50000 100000", 1), ("nonsense", AFFINE)]
)
def test_version_2(written: str, cores: int, tmp_path: Path) -> None:
    assert usable_cores(lay(v2(tmp_path), {"sys/fs/cgroup/cpu.max": written})) == cores


def test_version_2_the_tightest_on_the_way_up_counts(tmp_path: Path) -> None:
    root = lay(
        v2(tmp_path, "/pods/mine"),
        {
            "sys/fs/cgroup/pods/cpu.max": "100000 100000",
            "sys/fs/cgroup/pods/mine/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/memory.max": str(4 * GIB),
            "sys/fs/cgroup/pods/memory.current": str(3 * GIB),
            "sys/fs/cgroup/pods/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max",
        },
    )
    assert usable_cores(root) == 1
    assert limited_memory(root) == Memory(4 * GIB, 2 * GIB)  # the page cache is given up
    found = usable_memory(root)
    assert found.total <= 4 * GIB and found.available <= 2 * GIB


def test_version_1_known_by_the_path_of_the_host(tmp_path: Path) -> None:
    """A container without a namespace of its own for groups: the path is the host's, the mount shows its own group."""
    root = lay(
        tmp_path,
        {
            "proc/self/mountinfo": V1_MOUNTS.replace(" / /sys", " /docker/abc /sys"),
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert usable_cores(root) == 1
    assert limited_memory(root) == Memory(2 * GIB, GIB)


def test_version_1_without_limits(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            "proc/self/mountinfo": V1_MOUNTS,
            "proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert usable_cores(root) == AFFINE and limited_memory(root) is None


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == AFFINE and limited_memory(tmp_path) is None


def test_this_machine() -> None:
    memory = usable_memory()
    assert 1 <= usable_cores() <= AFFINE
    assert 0 < memory.available <= memory.total


@pytest.mark.skipif(AFFINE < 2, reason="one core is no more than a quota of one")
def test_doctor_and_bench_obey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    files = {"cpu.max": "100000 100000", "memory.max": str(2 * GIB), "memory.current": str(GIB // 2)}
    monkeypatch.setattr(quota, "ROOT", lay(v2(tmp_path), {f"sys/fs/cgroup/{name}": files[name] for name in files}))
    assert "1 core," in machine.check_platform().detail
    threads = machine.check_threads()
    assert threads.state == "note" and f"1 core of {AFFINE}" in threads.detail
    assert threads.advice == "VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "this process may use 1 core" in machine.check_threads().detail
    memory = machine.check_kv_cache()
    assert "1.5 of 2.0 GiB are free (a quota)" in memory.detail and "SPACE=1 takes" in memory.advice
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert machine.check_kv_cache().state == "bad"
    assert shared_environment({})["OMP_NUM_THREADS"] == "1"
