"""Our figures on the host's own way from the engine core to a front end: beside its counts of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_medusa.host.metrics.figures import Figures


@dataclass
class MedusaStats(SpecDecodingStats):
    """The host's counts of one step, now and then with a report of ours (see `Outbox`)."""

    figures: Figures | None = None


def with_figures(stats: SpecDecodingStats | None, figures: Figures, num_spec_tokens: int) -> MedusaStats:
    """The host's counts `stats` (None: nothing was drafted in this step) with our figures."""
    return MedusaStats(**vars(stats or SpecDecodingStats.new(num_spec_tokens)), figures=figures)


def leave_out(stats: SpecDecodingStats, emitted: int, accepted: int) -> None:
    """Take back what the host counted as accepted behind the end of a request.

    Args:
        stats: of the step.
        emitted: tokens that the request got.
        accepted: more than these, as the host counted them.
    """
    stats.num_accepted_tokens -= accepted - emitted
    for position in range(emitted, accepted):
        stats.num_accepted_tokens_per_pos[position] -= 1


def leave_out_of_request(metrics: Any, emitted: int, accepted: int) -> None:
    """The same in the host's counts of one request (`--per-request-spec-decode-metrics`), of its latest step."""
    metrics.histogram[accepted] -= 1
    metrics.histogram[emitted] += 1
    if metrics.per_step_accepted:
        metrics.per_step_accepted[-1] = emitted
