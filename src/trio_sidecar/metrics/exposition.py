"""From plain numbers to Prometheus' text format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from trio_sidecar.metrics.families import LATENCY_BOUNDS, Kind
from trio_sidecar.metrics.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from trio_sidecar.metrics.families import Family

__all__ = ["TEXT_FORMAT", "FamilyCollector", "Labels", "Reading", "Value", "exposition", "passed_on"]

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of :func:`exposition`'s text."""

Labels: TypeAlias = tuple[str, ...]
"""Values of a family's labels, in the order of its labels."""

Value: TypeAlias = "float | Histogram"

Reading: TypeAlias = "Mapping[str, Value | Mapping[Labels, Value]]"
"""The values of families by name, without prefix; a family with labels has a value for each of its label sets."""

_NOTHING: dict[Kind, Value] = {Kind.COUNTER: 0.0, Kind.GAUGE: 0.0, Kind.HISTOGRAM: Histogram(LATENCY_BOUNDS)}
_PLAIN: dict[Kind, Any] = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}

log = structlog.get_logger("trio_sidecar.metrics")


class FamilyCollector(Collector):
    """Implements prometheus_client's collector over a table of families.

    Every family is there from the start: one that the reading does not have, or not with all label values that are
    known, is 0.

    Args:
        families: The table.
        read: Gives the values; called at each scrape, on the thread of whoever scrapes.
        labels: Label values that are the same in all series, and narrow those of the table.
    """

    def __init__(
        self, families: Iterable[Family], read: Callable[[], Reading], labels: Mapping[str, str] | None = None
    ) -> None:
        self._families = tuple(families)
        self._read = read
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """All families with their values now.

        Raises:
            KeyError: The reading has a family that the table has not.
        """
        reading = dict(self._read())
        for family in self._families:
            yield self._metric(family, reading.pop(family.key, {}))
        if reading:
            raise KeyError(*reading)

    def _metric(self, family: Family, found: Value | Mapping[Labels, Value]) -> Metric:
        names = list(family.labels)
        values: dict[Labels, Value] = dict.fromkeys(self._known(family), _NOTHING[family.kind])
        if isinstance(found, Mapping):
            values |= found
        else:
            values = dict.fromkeys(values, found)
        if family.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(family.name, family.help, labels=names)
            for labels, value in values.items():
                assert isinstance(value, Histogram)  # noqa: S101 - the table says so
                histogram.add_metric(labels, *_buckets(value))
            return histogram
        plain: CounterMetricFamily | GaugeMetricFamily = _PLAIN[family.kind](family.name, family.help, labels=names)
        for labels, value in values.items():
            assert not isinstance(value, Histogram)  # noqa: S101 - as above
            plain.add_metric(labels, value)
        return plain

    def _known(self, family: Family) -> Iterator[Labels]:
        """The label sets that can be told beforehand."""
        return itertools.product(
            *((self._labels[name],) if name in self._labels else values for name, values in family.labels.items())
        )


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    total = 0.0
    buckets = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), tuple(histogram.counts), strict=True):
        total += count
        buckets.append((bound, total))
    return buckets, histogram.sum


def exposition(*collectors: Collector) -> str:
    """The text of these collectors; empty, with a line in the log, if one fails: a scrape must not cost more."""
    registry = CollectorRegistry(auto_describe=False)
    try:
        for collector in collectors:
            registry.register(collector)
        return generate_latest(registry).decode()
    except Exception as error:  # whoever asks for metrics must not disturb those who want tokens
        log.warning("metrics_failed", exc_info=error)
        return ""


class passed_on(Collector):  # noqa: N801 - used like a function
    """The families of this process' own registry whose names begin with a prefix, such as ``vllm:``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Those that there are now."""
        return (metric for metric in REGISTRY.collect() if metric.name.startswith(self._prefix))
