"""Rows a second of training, by one process or by several.

    python benchmarks/training_speed.py [--steps 60]
    torchrun --standalone --nproc-per-node 2 benchmarks/training_speed.py

Trains the default heads on random hidden rows of SmolLM2-135M's size, each process with one thread; the target has said
what it thinks of each row before. Prints one line of JSON.
"""

import argparse
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from training_memory import HIDDEN, VOCAB, write_rows

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.hidden import HiddenRows
from vllm_medusa.training.loop import choose_draft_vocab, train_heads
from vllm_medusa.training.ranks import launched, together
from vllm_medusa.training.step import LoopOptions, Progress, start_trunk
from vllm_medusa.training.teacher import TOP, Teacher

BATCH, WARM_UP = 256, 10


class _Enough(Exception):
    """The steps asked for are done."""


def new_heads(rows: HiddenRows, draft_vocab: int) -> MedusaHeads:
    """The default heads on a random target."""
    matrix = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(
        std=0.1, generator=torch.Generator().manual_seed(1)
    )
    config = HeadsConfig(
        num_heads=4,
        num_layers=0,
        trunk_size=1152,
        root_conditioned=True,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
    )
    heads = MedusaHeads(config)
    assert heads.token_map is not None
    heads.token_map.copy_(choose_draft_vocab(rows.tokens, draft_vocab, VOCAB))
    heads.bind(matrix, matrix)
    start_trunk(heads, rows, seed=0)
    return heads


def main() -> None:
    """Train for so many steps behind a few to warm up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = launched()
    with tempfile.TemporaryDirectory() as folder, together(ranks):
        write_rows(Path(folder), (arguments.steps + WARM_UP + 2) * BATCH)  # each process its own, all alike
        rows = HiddenRows.open(sorted(Path(folder).glob("shard-*")))
        rng = np.random.default_rng(0)
        said = rng.integers(0, arguments.draft_vocab, (len(rows), TOP), dtype=np.int32)
        teacher = Teacher(said, np.full((len(rows), TOP), 0.05, dtype=np.float16))
        began = done = 0.0

        def count(now: Progress) -> None:
            nonlocal began, done
            if now.step == WARM_UP:
                began = time.monotonic()
            if now.step == WARM_UP + arguments.steps:
                done = time.monotonic()
                raise _Enough

        heads = new_heads(rows, arguments.draft_vocab)
        with suppress(_Enough):
            options = LoopOptions(epochs=1, batch_size=BATCH, loss="mixed")
            train_heads(heads, rows, options, count, teacher=teacher, ranks=ranks)
    if ranks.is_first:
        speed = arguments.steps * BATCH / (done - began)
        print(json.dumps({"processes": ranks.count, "rows_per_second": round(speed, 1), "steps": arguments.steps}))


if __name__ == "__main__":
    main()
