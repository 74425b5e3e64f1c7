"""What serving with trees has brought so far: counts, times, and the last few trees to look at."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.host.metrics.figures import STAGES, Counts, batch_label
from vllm_medusa.host.trees import StepTrees

Ints = npt.NDArray[np.int64]


@dataclass
class Statistics:
    """Running totals of one worker; `report` turns them into plain values.

    Attributes:
        totals: of all steps.
        examples: the last trees that were walked.
    """

    totals: Counts = field(default_factory=Counts)
    examples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=32))
    _step: Counts | None = None
    _seconds: dict[str, float] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Nothing is counted yet of the step that begins."""
        self._step, self._seconds = None, dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one of the STAGES of a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def count(
        self, trees: StepTrees, roots: Ints, paths: Ints, tokens: Ints, emitted: Ints, counted: npt.NDArray[np.bool_]
    ) -> None:
        """Count the walks of one step.

        Args:
            trees: the step's trees.
            roots: int64 [R], root tokens.
            paths: int64 [R, D + 1], accepted rows, padded with -1.
            tokens: int64 [R, D + 1], walked tokens, padded with -1.
            emitted: int64 [R], how many of its tokens each request gets.
            counted: bool [R], requests that decode (prompts that are still computed are not counted).
        """
        requests = int(counted.sum())
        if not requests:
            return
        accepted = np.minimum(emitted, (paths >= 0).sum(axis=1) - 1)
        depth = np.arange(paths.shape[1] - 1)
        kept = (depth < accepted[:, None])[counted]
        label = batch_label(requests)
        self._step = step = Counts(
            steps={label: 1},
            request_steps={label: requests},
            drafted_nodes={label: int(trees.sizes[counted].sum())},
            emitted_tokens=int(emitted[counted].sum()),
            accepted_by_depth=kept.sum(axis=0)[: int(accepted[counted].max())].tolist(),
        )
        if trees.num_nodes:
            step.drafted_by_rank = _occurrences(trees.ranks[counted])
            step.accepted_by_rank = _occurrences(np.where(kept, trees.accepted_ranks(paths)[counted], -1))
        for row in np.flatnonzero(counted & (trees.sizes > 0))[:1]:
            path = paths[row, 1 : 1 + accepted[row]]
            self._remember(trees, int(row), int(roots[row]), path, tokens[row, : emitted[row]])

    def end_step(self, seconds: float | None) -> Counts | None:
        """Add the step to the totals.

        Args:
            seconds: the step's, from its beginning to the drafts for the next one; None: prompts were computed too,
                so that its times tell nothing about decoding.

        Returns:
            The step's own counts; None if no request decoded.
        """
        step, self._step = self._step, None
        if step is None:
            return None
        if seconds is not None:
            step.seconds = {**self._seconds, "step": seconds}
        self.totals.add(step)
        return step

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
                "accepted_rows": path.tolist(),
                "emitted": tokens.tolist(),
            }
        )

    def report(self) -> dict[str, Any]:
        """Totals and the figures that follow: see `Counts`."""
        totals = self.totals
        figures = asdict(totals)
        del figures["candidates"]
        by_batch = {name: figures.pop(name) for name in ("steps", "request_steps", "drafted_nodes")}
        return {
            **figures,
            "steps": sum(totals.steps.values()),
            "request_steps": totals.num_request_steps,
            "drafted_nodes": totals.num_drafted,
            "by_batch_size": by_batch,
            "seconds": {**dict.fromkeys((*STAGES, "step"), 0.0), **totals.seconds},
            "mean_accepted_length": totals.mean_accepted_length,
            "overhead_share": totals.overhead_share,
            "examples": list(self.examples),
        }


def in_one_line(report: dict[str, Any]) -> str:
    """The figures of a runner's report that explain a server's speed."""
    times = ", ".join(f"{row['tokens']}: {row['milliseconds']:.1f}" for row in report["cost"])
    nodes = report["drafted_nodes"] / max(report["request_steps"], 1)
    trust = f" {report['trust']:.0%} of promised tokens came true;" if "trust" in report else ""
    return (
        f"Medusa: {report['mean_accepted_length']:.2f} tokens a step, {nodes:.1f} nodes;{trust} "
        f"overhead {report['overhead_share']:.0%}; milliseconds by tokens in a step {{{times}}}."
    )


def _occurrences(values: Ints) -> list[int]:
    """How often 0, 1, 2, ... occur; negative values do not count."""
    counts: list[int] = np.bincount(values[values >= 0]).tolist()
    return counts
