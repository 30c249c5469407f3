"""Prometheus' text, read as Prometheus does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["values"]


def values(text: str, prefix: str = "trio_sidecar_") -> dict[str, float]:
    """Values by name without the prefix, and labels, such as ``chunks_total{role=agg}``; others are left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name.startswith(prefix):
                name = one.name.removeprefix(prefix)
                labels = ",".join(f"{label}={value}" for label, value in sorted(one.labels.items()))
                found[f"{name}{{{labels}}}" if labels else name] = one.value
    return found
