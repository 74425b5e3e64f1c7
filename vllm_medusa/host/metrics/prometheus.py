"""Our metrics in `/metrics`, beside the host's own about drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

from vllm_medusa.host.choice import is_ours
from vllm_medusa.host.metrics.figures import STAGES, Counts, Figures, Learnt
from vllm_medusa.host.metrics.stats import MedusaStats

PREFIX = "vllm_medusa:"
COUNTERS = {
    "steps": ("Engine steps in which requests decoded; batch_size: the power of two not below them.", "batch_size"),
    "request_steps": ("Steps counted once per decoding request.", "batch_size"),
    "drafted_nodes": ("Tree nodes checked.", "batch_size"),
    "wasted_nodes": ("Tree nodes checked that brought no token.", None),
    "emitted_tokens": ("Tokens that decode steps brought, none behind the end of a request.", None),
    "accepted_nodes_by_depth": ("Accepted nodes whose token was emitted; depth 1 follows the root.", "depth"),
    "drafted_nodes_by_rank": (
        "Tree nodes checked, by rank among a head's candidates; text: prompt lookup's.",
        "rank",
    ),
    "accepted_nodes_by_rank": ("Accepted nodes by rank among a head's candidates; text: prompt lookup's.", "rank"),
    "stage_seconds": ("Time of steps in which no prompt is computed; host: what is in no other stage.", "stage"),
}
GAUGES = {
    "mean_accepted_length": ("Tokens per request and step, over about ten seconds of decoding.", None),
    "overhead_ratio": ("Share of propose, walk and commit in the steps' time, over the same.", None),
    "trust_ratio": ("Accepted nodes over what drafts promised, as learnt.", None),
    "step_cost_seconds": ("A step by its tokens, without the heads and without reading texts, as learnt.", "tokens"),
    "heads_cost_seconds": ("Asking the heads, by requests, as learnt.", "requests"),
}
_registered: list[Any] = []


class MedusaProm(SpecDecodingProm):
    """The host's metrics about drafts, and ours where Medusa serves."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As the host builds its own: the latest engine of a process takes the names over from the one before."""
        super().__init__(speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs)
        while _registered:
            REGISTRY.unregister(_registered.pop())
        self._engines = dict(per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        if speculative_config is None or not is_ours(speculative_config):
            return
        for name, (help_text, label) in COUNTERS.items():
            self._metrics[name] = Counter(PREFIX + name, help_text, _with(labelnames, label))
        for name, (help_text, label) in GAUGES.items():
            names = _with(labelnames, label)
            self._metrics[name] = Gauge(PREFIX + name, help_text, names, multiprocess_mode="mostrecent")
        _registered.extend(self._metrics.values())

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count one step of an engine."""
        super().observe(spec_decoding_stats, engine_idx)
        figures = spec_decoding_stats.figures if isinstance(spec_decoding_stats, MedusaStats) else None
        if figures is None or not self._metrics:
            return
        engine = self._engines[engine_idx]
        self._count(engine, figures.counts)
        self._show_recent(engine, figures)
        if figures.learnt is not None:
            self._show_learnt(engine, figures.learnt)

    def _count(self, engine: list[object], counts: Counts) -> None:
        self._metrics["emitted_tokens"].labels(*engine).inc(counts.emitted_tokens)
        self._metrics["wasted_nodes"].labels(*engine).inc(counts.num_drafted - counts.num_accepted)
        for name in ("steps", "request_steps", "drafted_nodes"):
            self._increase(name, engine, getattr(counts, name).items())
        by_depth = enumerate(counts.accepted_by_depth, start=1)
        self._increase("accepted_nodes_by_depth", engine, by_depth)
        self._increase("drafted_nodes_by_rank", engine, _by_rank(counts.drafted_by_rank, counts.candidates))
        self._increase("accepted_nodes_by_rank", engine, _by_rank(counts.accepted_by_rank, counts.candidates))
        self._increase("stage_seconds", engine, stage_seconds(counts.seconds).items())

    def _increase(self, name: str, engine: list[object], values: Iterable[tuple[object, float]]) -> None:
        for label, value in values:
            self._metrics[name].labels(*engine, str(label)).inc(value)

    def _show_recent(self, engine: list[object], figures: Figures) -> None:
        for name, value in (
            ("mean_accepted_length", figures.mean_accepted_length),
            ("overhead_ratio", figures.overhead_share),
        ):
            if value is not None:
                self._metrics[name].labels(*engine).set(value)

    def _show_learnt(self, engine: list[object], learnt: Learnt) -> None:
        self._metrics["trust_ratio"].labels(*engine).set(learnt.trust)
        for name, times in (("step_cost_seconds", learnt.step_seconds), ("heads_cost_seconds", learnt.heads_seconds)):
            for size, seconds in times.items():
                self._metrics[name].labels(*engine, str(size)).set(seconds)


def stage_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Times by stage that add up to the steps': the stages timed, and "host" for the rest.

    Steps without drafts have neither a walk nor, perhaps, anything else but their forward pass.

    >>> stage_seconds({"forward": 1.0, "walk": 0.25, "commit": 0.0, "propose": 0.25, "step": 2.0})
    {'forward': 1.0, 'walk': 0.25, 'commit': 0.0, 'propose': 0.25, 'host': 0.5}
    >>> stage_seconds({"forward": 1.0, "step": 1.5})
    {'forward': 1.0, 'walk': 0.0, 'commit': 0.0, 'propose': 0.0, 'host': 0.5}
    """
    if not seconds:
        return {}
    stages = {stage: seconds.get(stage, 0.0) for stage in STAGES}
    return {**stages, "host": max(seconds.get("step", 0.0) - sum(stages.values()), 0.0)}


def rank_label(rank: int, candidates: int) -> str:
    """Ranks count from 1; beyond a head's candidates the request's own text drafted the node.

    >>> rank_label(0, 10), rank_label(10, 10)
    ('1', 'text')
    """
    return "text" if rank == candidates else str(rank + 1)


def _by_rank(values: list[int], candidates: int) -> Iterable[tuple[object, float]]:
    return ((rank_label(rank, candidates), value) for rank, value in enumerate(values) if value)


def _with(labelnames: list[str], label: str | None) -> list[str]:
    return labelnames if label is None else [*labelnames, label]
