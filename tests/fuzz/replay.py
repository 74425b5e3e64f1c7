"""Run a stored schedule again: python tests/fuzz/replay.py out/fuzz/seed-17.json"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
os.environ.setdefault("MEDUSA_LONG", "1")
sys.path[:0] = [str(HERE), str(HERE.parent / "host")]


def main(path: str) -> int:
    """Print what the schedule violates; the exit code says whether it does."""
    from hostile import start_worlds
    from schedules import Schedule

    schedule = Schedule.load(path)
    with tempfile.TemporaryDirectory() as folder:
        world = start_worlds(Path(folder), [schedule.model])[schedule.model]
        violation = world.violates(schedule)
    print(schedule.to_json())
    print(violation or "nothing is wrong")
    print(world.totals)
    return int(violation is not None)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"{__doc__}")
    sys.exit(main(sys.argv[1]))
