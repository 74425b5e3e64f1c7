"""Our line in a front end's log, after the host's own about drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_medusa.host.metrics.figures import Counts, Learnt
from vllm_medusa.host.metrics.prometheus import rank_label, stage_seconds
from vllm_medusa.host.metrics.stats import MedusaStats
from vllm_medusa.row_cost import row_cost

HARDLY_ANY = 0.25  # nodes per request and step: tries now and then, no more

logger = init_logger("vllm.medusa.metrics")


class MedusaLogging(SpecDecodingLogging):
    """The host's log line about drafts, and ours where Medusa served since the last one."""

    _learnt: Learnt | None = None  # the last that was told

    def reset(self) -> None:
        """Begin a new period."""
        super().reset()
        self._counts = Counts()

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Count one step of an engine."""
        figures = spec_decoding_stats.figures if isinstance(spec_decoding_stats, MedusaStats) else None
        if spec_decoding_stats.num_drafts or figures is None:  # the host divides by drafts
            super().observe(spec_decoding_stats)
        if figures is not None:
            self._counts.add(figures.counts)
            self._learnt = figures.learnt or self._learnt

    def log(self, log_fn: Callable[..., Any] = logger.info) -> None:
        """The host's line, then ours; nothing of a period in which nothing was decoded."""
        counts, learnt = self._counts, self._learnt
        super().log(log_fn=log_fn)
        self.reset()
        if counts.request_steps:
            log_fn("Medusa metrics: %s", describe(counts, learnt))


def describe(counts: Counts, learnt: Learnt | None) -> str:
    """A period's figures in one line."""
    steps = counts.num_request_steps
    wasted = counts.num_drafted - counts.num_accepted
    parts = [
        f"Mean accepted length: {counts.mean_accepted_length:.2f}",
        f"Drafted: {counts.num_drafted} nodes",
        f"Wasted: {wasted} nodes ({_percent(wasted, counts.num_drafted)})",
        "Nodes per request by batch size: "
        + _table((size, f"{counts.drafted_nodes[size] / n:.1f}") for size, n in sorted(counts.request_steps.items())),
        "Acceptance by depth: " + (", ".join(f"{n / steps:.3f}" for n in counts.accepted_by_depth) or "none"),
        "Acceptance by rank: " + _table(_acceptance_by_rank(counts)),
        f"Overhead: {100 * counts.overhead_share:.1f}% of the step time",
    ]
    stages = stage_seconds(counts.seconds)
    if whole := sum(stages.values()):
        parts.append("Step time: " + ", ".join(f"{name} {_percent(s, whole)}" for name, s in stages.items()))
    if learnt is not None:
        times = _table((size, f"{1e3 * seconds:.1f}") for size, seconds in sorted(learnt.step_seconds.items()))
        parts += [f"Promises kept: {100 * learnt.trust:.0f}%", f"Milliseconds by tokens in a step: {times}"]
        if cost := row_cost(learnt.step_seconds):
            share = f"{100 * cost.share:.0f}% of a step"
            pays = counts.num_drafted >= HARDLY_ANY * steps
            parts.append(f"A row more: {share}" if pays else f"Trees do not pay now: each row more takes {share}")
    return ", ".join(parts)


def _acceptance_by_rank(counts: Counts) -> list[tuple[str, str]]:
    accepted = [*counts.accepted_by_rank, *[0] * len(counts.drafted_by_rank)]
    return [
        (rank_label(rank, counts.candidates), f"{accepted[rank] / drafted:.3f}")
        for rank, drafted in enumerate(counts.drafted_by_rank)
        if drafted
    ]


def _table(rows: Any) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in rows) + "}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "none"
