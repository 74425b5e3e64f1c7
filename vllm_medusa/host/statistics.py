"""What serving with trees has brought so far: counts, times, and the last few trees to look at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.host.trees import StepTrees

Ints = npt.NDArray[np.int64]
STAGES = ("propose", "forward", "walk", "commit", "step")


@dataclass
class Statistics:
    """Running totals of one worker; `report` turns them into plain values."""

    steps: int = 0
    request_steps: int = 0
    emitted_tokens: int = 0
    drafted_nodes: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    examples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=32))

    def count(
        self, trees: StepTrees, roots: Ints, paths: Ints, tokens: Ints, lengths: Ints, counted: npt.NDArray[np.bool_]
    ) -> None:
        """Add one decode step.

        Args:
            trees: the step's trees.
            roots: int64 [R], root tokens.
            paths: int64 [R, D + 1], accepted rows, padded with -1.
            tokens: int64 [R, D + 1], emitted tokens, padded with -1.
            lengths: int64 [R], tokens emitted by each request.
            counted: bool [R], requests that decode (prompts that are still computed are not counted).
        """
        if not counted.any():
            return
        self.steps += 1
        self.request_steps += int(counted.sum())
        self.emitted_tokens += int(lengths[counted].sum())
        self.drafted_nodes += int(trees.sizes[counted].sum())
        accepted = lengths[counted] - 1
        deepest = int(accepted.max())
        self.accepted_by_depth += [0] * (deepest - len(self.accepted_by_depth))
        for depth in range(deepest):
            self.accepted_by_depth[depth] += int((accepted > depth).sum())
        if trees.num_nodes:
            self.drafted_by_rank = _add_counts(self.drafted_by_rank, trees.ranks[counted])
            self.accepted_by_rank = _add_counts(self.accepted_by_rank, trees.accepted_ranks(paths)[counted])
        for row in np.flatnonzero(counted & (trees.sizes > 0))[:1]:
            self._remember(trees, int(row), int(roots[row]), paths[row], tokens[row])

    def _remember(self, trees: StepTrees, row: int, root: int, path: Ints, tokens: Ints) -> None:
        if trees.drafts[row] is None:
            return
        size = int(trees.sizes[row])
        self.examples.append(
            {
                "request": trees.requests[row],
                "context": int(trees.context[row]),
                "root": root,
                "tokens": trees.tokens[row, :size].tolist(),
                "parents": trees.parents[row, :size].tolist(),
                "ranks": trees.ranks[row, :size].tolist(),
                "reach": [round(float(p), 5) for p in trees.reach[row, :size]],
                "accepted_rows": path[path > 0].tolist(),
                "emitted": tokens[tokens >= 0].tolist(),
            }
        )

    def report(self) -> dict[str, Any]:
        """Totals and the figures that follow: mean accepted length (bonus token counted) and overhead share.

        By rank: of a head's R candidates, and last, at place R, tokens that only the request's own text expected.
        """
        step = self.seconds["step"]
        ours = self.seconds["propose"] + self.seconds["walk"] + self.seconds["commit"]
        return {
            "steps": self.steps,
            "request_steps": self.request_steps,
            "emitted_tokens": self.emitted_tokens,
            "drafted_nodes": self.drafted_nodes,
            "accepted_by_depth": list(self.accepted_by_depth),
            "drafted_by_rank": list(self.drafted_by_rank),
            "accepted_by_rank": list(self.accepted_by_rank),
            "mean_accepted_length": self.emitted_tokens / self.request_steps if self.request_steps else 0.0,
            "seconds": dict(self.seconds),
            "overhead_share": ours / step if step else 0.0,
            "examples": list(self.examples),
        }


def _add_counts(totals: list[int], values: Ints) -> list[int]:
    """`totals[v]` more by how often v occurs; negative values do not count."""
    counts = np.bincount(values[values >= 0], minlength=len(totals))
    counts[: len(totals)] += np.array(totals, dtype=np.int64)
    added: list[int] = counts.tolist()
    return added
