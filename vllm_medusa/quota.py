"""What this process may use of its machine: cores and memory, as far as containers limit them.

A container's quota shows in no count of cores and in no table of memory; it stands in files of its control groups, of
which each one on the way up to the root may limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: all that there is, and what is free for one more program."""

    total: int
    available: int


def usable_cores(root: Path | None = None) -> int:
    """Cores that this process may run on, or whole ones that its quota is worth if these are fewer; at least 1.

    Args:
        root: of the file system in which the control groups are looked up; None: this machine's.
    """
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quotas = [quota for quota in (_cpu_quota(folder) for folder in _groups("cpu", root or ROOT)) if quota is not None]
    return max(1, min(affine, *(int(quota) for quota in quotas)) if quotas else affine)


def limited_memory(root: Path | None = None) -> Memory | None:
    """The memory of the tightest control group above this process; None: no quota.

    Files in the page cache that nobody uses count as free: the system gives them up.
    """
    found = [limit for limit in map(_memory_limit, _groups("memory", root or ROOT)) if limit is not None]
    if not found:
        return None
    return Memory(min(limit.total for limit in found), min(limit.available for limit in found))


def usable_memory(root: Path | None = None) -> Memory:
    """The machine's memory, or that of the tightest control group if it is less."""
    page = os.sysconf("SC_PAGE_SIZE")
    machine = page * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo("MemAvailable")
    free = page * os.sysconf("SC_AVPHYS_PAGES") if free is None else free
    limit = limited_memory(root)
    if limit is None:
        return Memory(machine, free)
    return Memory(min(machine, limit.total), min(free, limit.available))


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that a control group gets."""
    written = _read(folder / "cpu.max")  # version 2: "200000 100000", microseconds of each so many, or "max 100000"
    parts = written.split() if written else [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = (int(part or "") for part in parts)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limit(folder: Path) -> Memory | None:
    for limit, used, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        total = _read(folder / limit)
        if total is None or not total.isdecimal() or int(total) >= 2**60:  # version 1 writes a number without a meaning
            continue
        told = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
        cached = sum(int(parts[1]) for parts in told if len(parts) == 2 and parts[0] == idle)
        taken = int(_read(folder / used) or 0) - cached
        return Memory(int(total), max(0, int(total) - max(0, taken)))
    return None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups above this process that may limit what `controller` does, both versions."""
    for mount, inside, unified, options in _mounts(root):
        own = _own_group(None if unified else controller, root)
        if own is None or not (unified or controller in options):
            continue
        # A container may see its own group as the root of the mount, or the path that the host knows it by.
        below = os.path.relpath(own, inside) if inside != "/" else own.lstrip("/")
        place = mount if below.startswith("..") else mount / below
        for folder in (place, *place.parents):
            if folder.is_dir():
                yield folder
            if folder == mount:
                break


def _mounts(root: Path) -> Iterator[tuple[Path, str, bool, list[str]]]:
    """Where hierarchies of control groups are mounted: (folder, the group it shows, is it version 2, controllers)."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            yield root / fields[4].lstrip("/"), fields[3], kind[0] == "cgroup2", kind[2].split(",")


def _own_group(controller: str | None, root: Path) -> str | None:
    """The path of this process's group; `controller` None: of version 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller is None and number == "0" and not names) or (controller in names.split(",")):
            return path
    return None


def _meminfo(name: str) -> int | None:
    for line in (_read(ROOT / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
