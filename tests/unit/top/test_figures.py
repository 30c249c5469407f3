"""Figures between two samples of a target."""

from __future__ import annotations

import pytest

from trio_sidecar.top.figures import increase, quantile, rate
from trio_sidecar.top.scrape import Sample, parse


def sample(at: float, text: str) -> Sample:
    """What a target says at a moment."""
    return parse(text, at)


def counter(at: float, **values: float) -> Sample:
    """A counter with a value for each reason."""
    lines = [f'x_total{{reason="{reason}"}} {value}' for reason, value in values.items()]
    return sample(at, "# TYPE x counter\n" + "\n".join(lines) + "\n")


def histogram(at: float, *counts: int) -> Sample:
    """A histogram with the bounds 1, 2, 4 and infinity, and these cumulative counts."""
    bounds = ("1", "2", "4", "+Inf")
    lines = [f'h_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
    return sample(at, "# TYPE h histogram\n" + "\n".join(lines) + f"\nh_count {counts[-1]}\nh_sum 0\n")


def test_increase_and_rate() -> None:
    """All series with the labels count, and the time between the samples."""
    before, now = counter(10.0, a=1, b=5), counter(12.0, a=4, b=6)
    assert 4 == increase(before, now, "x_total")
    assert 3 == increase(before, now, "x_total", reason="a")
    assert 1.5 == rate(before, now, "x_total", reason="a")


def test_one_sample_has_no_increase() -> None:
    """Without an earlier sample, or without the counter in one of them, nothing is said."""
    now = counter(1.0, a=1)
    assert None is increase(None, now, "x_total")
    assert None is rate(None, now, "x_total")
    assert None is increase(now, now, "y_total")
    assert None is rate(now, now, "x_total")


def test_a_process_that_was_started_anew() -> None:
    """A counter that has become smaller has grown from 0, and so has a histogram."""
    assert 2 == increase(counter(1.0, a=10), counter(2.0, a=2), "x_total")
    assert 1.0 == quantile(histogram(1.0, 9, 9, 9, 9), histogram(2.0, 4, 4, 4, 4), "h", 1.0)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (0.8, 2.4), (0.99, 3.92), (1.0, 4.0)]
)
def test_quantile(share: float, expected: float) -> None:
    """Half of the new observations are below 1, a quarter between 1 and 2, the rest between 2 and 4."""
    found = quantile(histogram(0.0, 5, 5, 5, 5), histogram(1.0, 15, 20, 25, 25), "h", share)
    assert found == pytest.approx(expected)


def test_quantile_beyond_the_last_bound() -> None:
    """All that is known is the bound."""
    assert 4.0 == quantile(histogram(0.0, 0, 0, 0, 0), histogram(1.0, 0, 0, 0, 3), "h", 0.5)


def test_quantile_of_nothing() -> None:
    """No new observation, no earlier sample, or no such histogram: no value."""
    still = histogram(0.0, 5, 5, 5, 5)
    assert None is quantile(still, histogram(1.0, 5, 5, 5, 5), "h", 0.5)
    assert None is quantile(None, still, "h", 0.5)
    assert None is quantile(still, still, "g", 0.5)
