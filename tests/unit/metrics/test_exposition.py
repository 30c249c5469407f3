"""Plain numbers become Prometheus' text, every family from the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
import structlog.testing
from prometheus_client.parser import text_string_to_metric_families

from trio_sidecar.metrics import (
    ENGINE_FAMILIES,
    WORKER_FAMILIES,
    Family,
    FamilyCollector,
    Histogram,
    Kind,
    exposition,
    passed_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = (
    Family("trio_sidecar_things", Kind.COUNTER, "Things.", {"role": ("a", "b"), "end": ("x", "y")}),
    Family("trio_sidecar_level", Kind.GAUGE, "A level."),
    Family("trio_sidecar_wait_seconds", Kind.HISTOGRAM, "A time.", {"role": ("a", "b")}),
    Family("trio_sidecar_slots", Kind.GAUGE, "Slots.", {"slot": ()}),
)


def samples(text: str) -> dict[str, float]:
    """Values by what stands before them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}"] = one.value
    return found


@pytest.mark.parametrize("families", [WORKER_FAMILIES, ENGINE_FAMILIES], ids=["worker", "engine"])
def test_every_family_is_there_from_the_start(families: tuple[Family, ...]) -> None:
    """Before anything has happened each has its name, its type, its help, and 0 for each known label value."""
    text = exposition(FamilyCollector(families, dict))
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert {family.name for family in families} == set(found)
    for family in families:
        assert (family.kind.value, family.help) == (found[family.name].type, found[family.name].documentation)
        assert all(sample.value == 0 for sample in found[family.name].samples)
        if all(family.labels.values()):
            assert found[family.name].samples


def test_what_was_counted_is_shown() -> None:
    """Label sets that were counted have their values, the others 0; a number without labels is all there is."""
    wait = Histogram((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 3.0):
        wait.observe(value)
    reading: dict[str, Any] = {
        "things": {("a", "y"): 3, ("a", "z"): 1},
        "level": 2.5,
        "wait_seconds": wait,
        "slots": {("1",): 4, ("2",): 0},
    }
    text = exposition(FamilyCollector(TABLE, lambda: reading, {"role": "a"}))
    expected = {
        "trio_sidecar_things_total{end=x,role=a}": 0,
        "trio_sidecar_things_total{end=y,role=a}": 3,
        "trio_sidecar_things_total{end=z,role=a}": 1,
        "trio_sidecar_level{}": 2.5,
        "trio_sidecar_wait_seconds_bucket{le=0.5,role=a}": 2,
        "trio_sidecar_wait_seconds_bucket{le=1.0,role=a}": 3,
        "trio_sidecar_wait_seconds_bucket{le=+Inf,role=a}": 4,
        "trio_sidecar_wait_seconds_count{role=a}": 4,
        "trio_sidecar_wait_seconds_sum{role=a}": 4.5,
        "trio_sidecar_slots{slot=1}": 4,
        "trio_sidecar_slots{slot=2}": 0,
    }
    assert expected == samples(text)


def test_a_histogram_without_observations_has_its_bounds() -> None:
    """A query over buckets finds all of them from the start."""
    found = samples(exposition(FamilyCollector(TABLE, dict)))
    assert 0 == found["trio_sidecar_wait_seconds_bucket{le=300.0,role=b}"]


@pytest.mark.parametrize("reading", [{"nobody_knows": 1}, None])
def test_a_reading_that_fails_costs_a_line_in_the_log(reading: dict[str, float] | None) -> None:
    """A scrape gets an empty text and never an exception: it runs on a thread of Dynamo's."""
    with structlog.testing.capture_logs() as logs:
        assert "" == exposition(FamilyCollector(TABLE, lambda: reading))  # type: ignore[arg-type, return-value]
    assert [("metrics_failed", "warning")] == [(line["event"], line["log_level"]) for line in logs]


@pytest.fixture
def foreign() -> Iterator[None]:
    """Two families in the process' own registry."""
    metrics = [prometheus_client.Gauge(name, "Foreign.") for name in ("vllm:kv_cache_usage_perc", "other")]
    metrics[0].set(0.5)
    yield
    for metric in metrics:
        prometheus_client.REGISTRY.unregister(metric)


@pytest.mark.usefixtures("foreign")
def test_families_of_an_engine_in_this_process_are_passed_on() -> None:
    """Those with its prefix, and no others; names keep their colon."""
    text = exposition(FamilyCollector(TABLE, dict), passed_on("vllm:"))
    assert "vllm:kv_cache_usage_perc 0.5\n" in text
    assert "other" not in text
    assert "python_info" not in text
    assert "trio_sidecar_level" in text


def test_names_follow_prometheus() -> None:
    """One prefix, base units, no ``_total`` in the table, and no name twice."""
    for families in (WORKER_FAMILIES, ENGINE_FAMILIES):
        names = [family.name for family in families]
        assert len(set(names)) == len(names)
        for family in families:
            assert family.name.startswith("trio_sidecar_")
            assert not family.name.endswith("_total")
            assert family.help.endswith(".")
            assert (family.kind is Kind.HISTOGRAM) == family.name.endswith("_seconds")
            assert (family.kind is Kind.COUNTER) == family.exposed.endswith("_total")
            assert f"trio_sidecar_{family.key}" == family.name
