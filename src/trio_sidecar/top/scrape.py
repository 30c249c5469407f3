"""Asking a metrics port, and reading what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client.parser import text_string_to_metric_families

from trio_sidecar.errors import SidecarError
from trio_sidecar.http import HttpAddress, HttpFailed, open_exchange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.endpoint import HttpEndpoint

__all__ = ["Sample", "ScrapeFailed", "Series", "parse", "scrape"]

HTTP_OK = 200
METRICS_PATH = "/metrics"


class ScrapeFailed(SidecarError):
    """A target did not answer, or not with metrics; says why in one line."""


@attrs.frozen(slots=True)
class Series:
    """One line of an exposition: a value under labels."""

    labels: Mapping[str, str]
    value: float

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it carries these labels, among others."""
        return all(self.labels.get(name) == value for name, value in labels.items())


@attrs.frozen(slots=True, kw_only=True)
class Sample:
    """All metrics of one target at one moment.

    Attributes:
        at: When it was asked, in Trio's time.
        series: The series by sample name, such as ``x_total`` or ``x_bucket``.
    """

    at: float
    series: Mapping[str, tuple[Series, ...]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series with these labels; None if there is none."""
        values = [one.value for one in self.series.get(name, ()) if one.has(labels)]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label, in the order in which they came."""
        sums: dict[str, float] = {}
        for one in self.series.get(name, ()):
            key = one.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + one.value
        return sums


def parse(text: str, at: float) -> Sample:
    """Read an exposition in Prometheus' text format.

    Raises:
        ScrapeFailed: It is in no such format.
    """
    series: dict[str, list[Series]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                series.setdefault(one.name, []).append(Series(one.labels, one.value))
    except Exception as error:
        reason = f"the answer is not in Prometheus' text format: {error}"
        raise ScrapeFailed(reason) from error
    return Sample(at=at, series={name: tuple(found) for name, found in series.items()})


async def scrape(target: HttpEndpoint, seconds: float) -> Sample:
    """Ask a target once.

    Args:
        target: Its URL; where that has no path, ``/metrics`` is asked for.
        seconds: How long it may take.

    Raises:
        ScrapeFailed: No answer in time, another status than 200, or no metrics.
    """
    at = trio.current_time()
    path = METRICS_PATH if target.path == "/" else target.path
    try:
        with trio.fail_after(seconds):
            async with open_exchange(HttpAddress(target.host, target.port), "GET", path) as exchange:
                body = await exchange.read_all()
    except trio.TooSlowError:
        reason = f"no answer within {seconds:g} s"
        raise ScrapeFailed(reason) from None
    except HttpFailed as error:
        raise ScrapeFailed(str(error)) from error
    if exchange.status != HTTP_OK:
        reason = f"{path} answered with HTTP status {exchange.status}"
        raise ScrapeFailed(reason)
    return parse(body.decode("utf-8", "replace"), at)
