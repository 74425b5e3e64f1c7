"""Read a Medusa server's /metrics and print what its trees bring.

python examples/read_metrics.py [--port 8000] [--engine 0]
"""

import argparse
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

OURS = "vllm_medusa:"


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", default="0", help="with data parallelism there are several")
    arguments = parser.parse_args()

    with urllib.request.urlopen(f"http://127.0.0.1:{arguments.port}/metrics", timeout=30) as answer:
        metrics = read(answer.read().decode(), arguments.engine)
    if f"{OURS}steps_total" not in metrics:
        raise SystemExit("no figures of Medusa yet: ask the server something first (and leave its stats on)")
    for name, value in table(metrics):
        print(f"{name:<37}{value}")


def read(text: str, engine: str) -> dict[str, dict[str, float]]:
    """An engine's values by metric, and by the label that the metric has beside model and engine ("" for none)."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            if sample.name.startswith(OURS) and sample.labels["engine"] == engine and len(own) <= 1:
                found.setdefault(sample.name, {})["".join(own)] = sample.value
    return found


def table(metrics: dict[str, dict[str, float]]) -> list[tuple[str, str]]:
    """Rows of a name and a value."""

    def values(name: str) -> dict[str, float]:
        return metrics.get(OURS + name, {})

    def total(name: str) -> float:
        return sum(values(name).values())

    def listed(numbers: dict[str, float], form: str) -> str:
        ordered = sorted(numbers.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 1 << 20)
        return ", ".join(f"{label}: {number:{form}}" for label, number in ordered)

    steps, nodes = values("request_steps_total"), values("drafted_nodes_total")
    tried, accepted = values("drafted_nodes_by_rank_total"), values("accepted_nodes_by_rank_total")
    stages = values("stage_seconds_total")
    step_seconds = sum(stages.values()) or 1.0
    return [
        ("tokens per request and step", f"{total('emitted_tokens_total') / total('request_steps_total'):.2f}"),
        ("  in the last seconds", f"{total('mean_accepted_length'):.2f}"),
        ("nodes drafted", f"{total('drafted_nodes_total'):.0f}"),
        ("  of these wasted", f"{total('wasted_nodes_total'):.0f}"),
        ("nodes per request, by batch size", listed({size: nodes[size] / n for size, n in steps.items()}, ".1f")),
        (
            "acceptance by depth",
            listed({d: n / sum(steps.values()) for d, n in values("accepted_nodes_by_depth_total").items()}, ".2f"),
        ),
        ("acceptance by rank", listed({rank: accepted.get(rank, 0.0) / n for rank, n in tried.items()}, ".2f")),
        ("share of step time", listed({stage: seconds / step_seconds for stage, seconds in stages.items()}, ".0%")),
        ("promises kept", f"{total('trust_ratio'):.0%}"),
        (
            "milliseconds by tokens in a step",
            listed({n: 1e3 * s for n, s in values("step_cost_seconds").items()}, ".1f"),
        ),
        (
            "milliseconds of heads, by requests",
            listed({n: 1e3 * s for n, s in values("heads_cost_seconds").items()}, ".2f"),
        ),
    ]


if __name__ == "__main__":
    main()
