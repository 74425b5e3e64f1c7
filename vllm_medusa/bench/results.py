"""The records of a bench and the figures drawn from them (design section 13)."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm_medusa.bench.peers import BASELINE


@dataclass(frozen=True)
class Run:
    """One method over one data set at one batch size, once.

    `steps` are engine steps that gave tokens; `mean_accepted_length` is what docs/metrics.md calls so (1.0 without
    speculation, 0.0 if no answer has a second token); `overhead_share` is the share of step time outside the target's
    forward, known for Medusa only. `identical_to_none`: the share of prompts whose tokens equal plain vLLM's;
    `identical_tokens`: the share of plain vLLM's tokens that come before the first difference.

    Against a server also, in seconds, median and 99th percentile: `ttft_*`, from sending a request to its first token;
    `itl_*`, between a token and the one before it, where the tokens of one chunk share the time since the chunk before
    (`client.Answer.inter_token`). None offline.
    """

    method: str
    dataset: str
    batch_size: int
    temperature: float
    round: int
    prompts: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    steps: int
    mean_accepted_length: float
    drafted_nodes_per_step: float
    overhead_share: float | None
    identical_to_none: float
    identical_tokens: float
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None

    @property
    def drafted_nodes_per_request(self) -> float:
        """Nodes drafted per request and decode step."""
        return self.drafted_nodes_per_step * self.steps / max(1.0, self.request_steps)

    @property
    def request_steps(self) -> float:
        """Decode steps, counted once for each request in them."""
        decoded = self.output_tokens - self.prompts
        return decoded / self.mean_accepted_length if self.mean_accepted_length else 0.0


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of a method over plain vLLM's in the same round: the least, the median and the greatest."""

    method: str
    dataset: str
    batch_size: int
    temperature: float
    rounds: int
    min: float
    median: float
    max: float


@dataclass
class Results:
    """All that one bench found.

    `costs`: method -> what its engine has learnt of the cost of a step, rows of tokens, milliseconds and steps.
    `left_out`: data set -> the number of its prompts that were too long to be asked, where there are any.
    `examples` (the last trees of the last Medusa run) are for drawing only.
    """

    provenance: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    costs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def ratios(self) -> list[Ratio]:
        """One per method, data set and batch size; the baseline has none."""
        return [
            Ratio(
                method,
                dataset,
                batch_size,
                temperature,
                len(values),
                min(values),
                statistics.median(values),
                max(values),
            )
            for (method, dataset, batch_size, temperature), values in self._speedups().items()
        ]

    def to_json(self) -> dict[str, Any]:
        """The bench contract's JSON."""
        return {
            "provenance": self.provenance,
            "runs": [asdict(run) for run in self.runs],
            "ratios": [asdict(ratio) for ratio in self.ratios()],
            **({"left_out": self.left_out} if self.left_out else {}),
        }

    def select(self, method: str, dataset: str | None = None, batch_size: int | None = None) -> list[Run]:
        """The runs of a method, optionally of one data set and batch size."""
        return [
            run
            for run in self.runs
            if run.method == method and dataset in (None, run.dataset) and batch_size in (None, run.batch_size)
        ]

    def _speedups(self) -> dict[tuple[str, str, int, float], list[float]]:
        plain = {(run.dataset, run.batch_size, run.temperature, run.round): run for run in self.select(BASELINE)}
        found: dict[tuple[str, str, int, float], list[float]] = {}
        for run in self.runs:
            base = plain.get((run.dataset, run.batch_size, run.temperature, run.round))
            if run.method != BASELINE and base is not None:
                key = (run.method, run.dataset, run.batch_size, run.temperature)
                found.setdefault(key, []).append(run.tokens_per_second / base.tokens_per_second)
        return found


def measure(
    measurement: dict[str, Any],
    plain_outputs: Sequence[Sequence[int]],
    *,
    method: str,
    dataset: str,
    batch_size: int,
    temperature: float,
    round: int,
) -> Run:
    """Turn a measurement (`measurement.Measurement`) into a run; `plain_outputs[i]`: plain vLLM's tokens, prompt i."""
    outputs = measurement["outputs"]
    tokens = sum(map(len, outputs))
    report = measurement["report"]
    ttft_p50, ttft_p99 = percentiles(measurement["first_token"])
    itl_p50, itl_p99 = percentiles(measurement["inter_token"])
    return Run(
        method=method,
        dataset=dataset,
        batch_size=batch_size,
        temperature=temperature,
        round=round,
        prompts=len(outputs),
        output_tokens=tokens,
        seconds=measurement["seconds"],
        tokens_per_second=tokens / measurement["seconds"],
        steps=measurement["steps"],
        mean_accepted_length=sum(len(output) - 1 for output in outputs if output)
        / max(1, measurement["request_steps"]),
        drafted_nodes_per_step=measurement["drafted_nodes"] / max(1, measurement["steps"]),
        overhead_share=report["overhead_share"] if report else None,
        identical_to_none=mean(float(a == b) for a, b in zip(outputs, plain_outputs, strict=True)),
        identical_tokens=sum(map(common_prefix, outputs, plain_outputs)) / max(1, sum(map(len, plain_outputs))),
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_p50=itl_p50,
        itl_p99=itl_p99,
    )


def percentiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Median and 99th percentile, interpolated; None for nothing.

    >>> percentiles([1.0, 2.0, 4.0])
    (2.0, 3.96)
    """
    if not values:
        return None, None
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two outputs share before they first differ.

    >>> common_prefix([5, 6, 7], [5, 6, 9, 7])
    2
    """
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))


def mean(values: Iterable[float]) -> float:
    """The mean, 0 for nothing."""
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0
