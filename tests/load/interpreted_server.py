"""`vllm serve` on Model Runner V2 by Triton's interpreter: python interpreted_server.py serve MODEL ..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))


def main() -> None:
    """The engine core is a fork, so that what makes kernels run here holds there, too."""
    import interpreter

    interpreter.prepare()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}
    from vllm.entrypoints.cli.main import main as serve

    serve()


if __name__ == "__main__":
    main()
