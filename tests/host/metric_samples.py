"""Metrics as a scraper sees them."""

from __future__ import annotations

from typing import Any

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families


def exposed(registry: Any = prometheus_client.REGISTRY) -> str:
    """The text of `/metrics`."""
    return prometheus_client.generate_latest(registry).decode()


def samples(text: str, name: str, engine: str = "0") -> dict[str, float]:
    """A metric's values that are not 0, by what labels it has beside the model's name and the engine ("" for none)."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels["engine"] == engine and sample.value:
                own = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
                found["".join(own)] = sample.value
    return found
