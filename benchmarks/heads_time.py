"""What drafting costs: milliseconds of `MedusaHeads.candidates` by kind of heads, draft vocabulary and batch size.

    python benchmarks/heads_time.py [--hidden 576] [--vocab 49152] [--threads 1] [--repeats 100]

Random weights of SmolLM2-135M's sizes in bfloat16, four heads, ten candidates each. Kinds take turns within each
repeat; the time under which a fifth of the repeats stays is shown. On one thread that is its processor time, to which
other work on the machine adds little.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_medusa.heads.config import HeadsConfig
from vllm_medusa.heads.model import MedusaHeads

KINDS: dict[str, dict[str, Any]] = {
    "plain, two blocks": {"num_layers": 2},
    "root token, two blocks": {"num_layers": 2, "root_conditioned": True},
    # Its width in rows' widths: as many weights as two blocks have.
    "root token, shared layer": {"num_layers": 0, "root_conditioned": True, "trunk_size": 2},
}
DRAFT_VOCABS, BATCHES = (4096, 8192, 16384), (1, 4, 32)
HEADS, TOP_K, WARM_UP = 4, 10, 5


@dataclass(frozen=True)
class Job:
    """One cell of the table: heads, and rows and root tokens of a batch."""

    heads: MedusaHeads
    rows: torch.Tensor
    roots: torch.Tensor

    def seconds(self, clock: Callable[[], float]) -> float:
        """One call."""
        began = clock()
        self.heads.candidates(self.rows, self.roots, TOP_K)
        return clock() - began


def random_heads(kind: str, draft_vocab: int, target: torch.Tensor) -> MedusaHeads:
    """Heads of a kind, bound to `target` [V, H]."""
    vocab, hidden = target.shape
    shape = dict(KINDS[kind])
    if "trunk_size" in shape:
        shape["trunk_size"] *= hidden
    config = HeadsConfig(
        num_heads=HEADS, hidden_size=hidden, vocab_size=vocab, draft_vocab_size=draft_vocab, top_k=TOP_K, **shape
    )
    heads = MedusaHeads(config).to(torch.bfloat16)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    heads.requires_grad_(False).eval().bind(target, target)
    return heads


@torch.inference_mode()
def milliseconds(jobs: dict[Any, Job], repeats: int, clock: Callable[[], float]) -> dict[Any, float]:
    """What a fifth of each job's repeats stay under."""
    times: dict[Any, list[float]] = {key: [] for key in jobs}
    for repeat in range(WARM_UP + repeats):
        for key, job in jobs.items():
            found = job.seconds(clock)
            if repeat >= WARM_UP:
                times[key].append(1e3 * found)
    return {key: statistics.quantiles(found, n=5)[0] for key, found in times.items()}


def main() -> None:
    """Time every kind, draft vocabulary and batch size and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hidden", type=int, default=576, help="size of the target's rows")
    parser.add_argument("--vocab", type=int, default=49152, help="the target's tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    target = torch.empty(arguments.vocab, arguments.hidden, dtype=torch.bfloat16).normal_(std=0.1)
    print(f"| heads | draft vocabulary | {' | '.join(f'batch {batch}' for batch in BATCHES)} |")
    print("| --- " * (2 + len(BATCHES)) + "|")
    for draft_vocab in (size for size in DRAFT_VOCABS if size <= arguments.vocab):
        jobs = {}
        for kind in KINDS:
            heads = random_heads(kind, draft_vocab, target)
            for batch in BATCHES:
                rows = torch.randn(batch, arguments.hidden).to(torch.bfloat16)
                jobs[kind, batch] = Job(heads, rows, torch.randint(0, arguments.vocab, (batch,)))
        found = milliseconds(jobs, arguments.repeats, clock)
        for kind in KINDS:
            cells = " | ".join(f"{found[kind, batch]:.2f} ms" for batch in BATCHES)
            print(f"| {kind} | {draft_vocab:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
