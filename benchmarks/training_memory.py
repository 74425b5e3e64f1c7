"""Peak resident memory of training against the number of answer tokens.

    python benchmarks/training_memory.py [--tokens 50000 1000000] [--losses ce kl mixed] [--steps 200]

Makes stores of random hidden rows of SmolLM2-135M's size (1.3 KB a token on disk, in a temporary folder), then trains
the default heads on them, each number of tokens and each loss in a process of its own: what `train` does between
answering and calibrating. `--steps 0` goes through all rows once.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.target import Target
from vllm_medusa.training.hidden import HiddenRows, RowWriter
from vllm_medusa.training.lessons import Loss
from vllm_medusa.training.loop import choose_draft_vocab, train_heads
from vllm_medusa.training.step import LoopOptions, Progress, start_trunk
from vllm_medusa.training.teacher import make_teacher

HIDDEN, VOCAB = 576, 49152
ANSWER, AT_ONCE, SHARD = 160, 128, 512  # tokens of an answer, requests in flight, answers in a store
MIB = 1024


@dataclass(frozen=True)
class Case:
    """One training run: rows in `folder`, learnt from for `steps` steps, all of them once if that is 0."""

    folder: Path
    loss: Loss
    steps: int
    draft_vocab: int


@dataclass(frozen=True)
class Measured:
    """Resident memory in MiB at the start, after opening the rows, and at most; and what was done."""

    start: float
    opened: float
    peak: float
    rows: int
    steps: int
    seconds: float


class _Enough(Exception):
    """The steps asked for are done."""


def write_rows(folder: Path, tokens: int) -> None:
    """Stores as `train` records them: answers in shards, the rows of requests in flight interleaved."""
    generator, numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
    answers = -(-tokens // ANSWER)
    for shard, first in enumerate(range(0, answers, SHARD)):
        writer = RowWriter(folder / f"shard-{shard:04d}", HIDDEN)
        here = min(SHARD, answers - first)
        for begin in range(0, here, AT_ONCE):
            sequences = list(range(begin, min(begin + AT_ONCE, here)))
            for position in range(ANSWER):
                said = numbers.zipf(1.2, len(sequences)) % VOCAB
                rows = torch.randn(len(sequences), HIDDEN, generator=generator)
                writer.append(sequences, [position] * len(sequences), said.tolist(), rows)
        writer.close()


def measure(case: Case) -> Measured:
    """Train in this process, which should be a fresh one."""
    start = resident("VmRSS")
    began = time.monotonic()
    shards = sorted(case.folder.glob("shard-*"))
    rows = HiddenRows.open(shards)
    opened = resident("VmRSS")
    seeded = torch.Generator().manual_seed(1)
    matrix = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(std=0.1, generator=seeded)
    config = HeadsConfig(
        num_heads=4,
        num_layers=0,
        trunk_size=2 * HIDDEN,
        root_conditioned=True,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=case.draft_vocab,
    )
    heads = MedusaHeads(config)
    assert heads.token_map is not None
    heads.token_map.copy_(choose_draft_vocab(rows.tokens, case.draft_vocab, VOCAB))
    heads.bind(matrix, matrix)
    start_trunk(heads, rows, seed=0)
    teacher = None if case.loss == "ce" else make_teacher(Target(matrix, matrix), heads.token_map, rows, case.folder)
    done = 0

    def stop(now: Progress) -> None:
        nonlocal done
        done = now.step
        if done == case.steps:
            raise _Enough

    with suppress(_Enough):
        train_heads(heads, rows, LoopOptions(epochs=1, loss=case.loss), stop, teacher=teacher)
    return Measured(start, opened, resident("VmHWM"), len(rows), done, time.monotonic() - began)


def resident(name: str) -> float:
    """A figure of this process from the kernel, in MiB: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / MIB


def main() -> None:
    """Measure every number of tokens with every loss and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 1_000_000])
    parser.add_argument("--losses", choices=["ce", "kl", "mixed"], nargs="+", default=["ce", "kl", "mixed"])
    parser.add_argument("--steps", type=int, default=200, help="steps of 256 rows; 0: all rows once")
    parser.add_argument(
        "--draft-vocab", type=int, default=8192, help="fewer make it faster: work is not what is measured"
    )
    arguments = parser.parse_args()

    print("| tokens | loss | steps | resident at the start | with rows opened | at most | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="training-memory-") as name:
        for tokens in arguments.tokens:
            folder = Path(name) / str(tokens)
            write_rows(folder, tokens)
            for loss in arguments.losses:
                for file in folder.glob("teacher-*"):
                    file.unlink()
                found = in_a_process_of_its_own(Case(folder, loss, arguments.steps, arguments.draft_vocab))
                memory = " | ".join(f"{mib:,.0f} MiB" for mib in (found.start, found.opened, found.peak))
                print(f"| {found.rows:,} | {loss} | {found.steps} | {memory} | {found.seconds:.0f} |", flush=True)


def in_a_process_of_its_own(case: Case) -> Measured:
    """`measure`, where nothing has been allocated before."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, case).result()


if __name__ == "__main__":
    main()
