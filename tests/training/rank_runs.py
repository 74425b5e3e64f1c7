"""What each of torchrun's processes does for test_ranks.py: toy heads, trained unbroken and in two halves.

torchrun --nproc-per-node N rank_runs.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.heads.target import Target
from vllm_medusa.training.hidden import HiddenRows, RowWriter
from vllm_medusa.training.loop import train_heads
from vllm_medusa.training.ranks import Ranks, launched, together
from vllm_medusa.training.snapshot import Snapshots
from vllm_medusa.training.step import LoopOptions, Progress, start_trunk
from vllm_medusa.training.teacher import Teacher, make_teacher

VOCAB, HIDDEN = 24, 16
OPTIONS = LoopOptions(epochs=2, batch_size=32, loss="mixed", learning_rate=5e-3)
ANSWERS = 27  # of 12 tokens: the last batch of an epoch has one row, which some processes have no share of


def target() -> Target:
    """A toy target."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    return Target(table, table)


def write_rows(folder: Path) -> None:
    """Answers that count on by threes."""
    writer, noise = RowWriter(folder, HIDDEN), torch.Generator().manual_seed(1)
    for number, start in enumerate(np.random.default_rng(1).integers(0, VOCAB, ANSWERS)):
        tokens = [int(start + 3 * i) % VOCAB for i in range(12)]
        rows = target().embedding[torch.tensor(tokens)] + 0.1 * torch.randn(12, HIDDEN, generator=noise)
        writer.append([number] * 12, list(range(12)), tokens, rows)
    writer.close()


def new_heads(rows: HiddenRows) -> MedusaHeads:
    """Untrained."""
    shape = {"num_heads": 2, "num_layers": 0, "trunk_size": 24, "root_conditioned": True, "top_k": 5}
    heads = MedusaHeads(HeadsConfig(hidden_size=HIDDEN, vocab_size=VOCAB, **shape))  # type: ignore[arg-type]
    heads.bind(*target().matrices)
    start_trunk(heads, rows, 0)
    return heads


class Killed(Exception):
    """Instead of a signal."""


def train(
    rows: HiddenRows,
    teacher: Teacher,
    ranks: Ranks,
    options: LoopOptions = OPTIONS,
    file: Path | None = None,
    until: int = 10**9,
    told: list[str] | None = None,
) -> tuple[MedusaHeads, Progress | None]:
    """Train, or go on; None: it was killed at the step `until`."""

    def kill(now: Progress) -> None:
        if now.step == until:
            raise Killed

    heads, told = new_heads(rows), [] if told is None else told
    snapshots = None if file is None else Snapshots(file, seconds=0.0)
    try:
        done = train_heads(
            heads, rows, options, kill, teacher=teacher, snapshots=snapshots, ranks=ranks, tell=told.append
        )
    except Killed:
        return heads, None
    return heads, done


def main(folder: Path) -> None:
    """All that is compared, into the folder, by the first process."""
    torch.set_num_threads(1)
    ranks, rows = launched(), HiddenRows.open([folder / "rows"])
    with together(ranks):
        teacher = make_teacher(target(), None, rows, folder / f"teacher-{ranks.count}", ranks=ranks)
        heads, done = train(rows, teacher, ranks)
        in_pieces, _ = train(rows, teacher, ranks, LoopOptions(**{**vars(OPTIONS), "accumulate": 3}))
        file = folder / f"run-{ranks.count}.pt"
        train(rows, teacher, ranks, file=file, until=9)
        ranks.wait()
        resumed, _ = train(rows, teacher, ranks, file=file)
    assert done is not None
    states = {"unbroken": heads, "in pieces": in_pieces, "resumed": resumed}
    found = {name: kind.state_dict() for name, kind in states.items()}
    torch.save({**found, "losses": done.losses}, folder / f"heads-{ranks.count}-{ranks.number}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
