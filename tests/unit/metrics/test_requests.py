"""The times of a request's tokens."""

from __future__ import annotations

from trio_sidecar.metrics import RequestMeter, TokenClock


def test_tokens_that_arrive_one_by_one() -> None:
    """The first token counts from the request, each later one from the one before."""
    meter = RequestMeter()
    clock = TokenClock(meter, began=10.0)
    for now, tokens in ((10.5, 0), (12.0, 1), (12.25, 2), (13.0, 3)):
        clock.arrived(now, tokens)
    assert (1, 0.5) == (sum(meter.first_response.counts), meter.first_response.sum)
    assert (1, 2.0) == (sum(meter.first_token.counts), meter.first_token.sum)
    assert (2, 1.0) == (sum(meter.inter_token.counts), meter.inter_token.sum)


def test_tokens_that_arrive_together_share_the_time() -> None:
    """Four tokens after a second took a quarter each; the first arrival is one first token, however many it brings."""
    meter = RequestMeter()
    clock = TokenClock(meter, began=0.0)
    clock.arrived(3.0, 5)
    clock.arrived(4.0, 9)
    assert (1, 3.0) == (sum(meter.first_token.counts), meter.first_token.sum)
    assert 1 == sum(meter.first_response.counts)
    assert 4 == meter.inter_token.counts[meter.inter_token.bounds.index(0.25)]
    assert 1.0 == meter.inter_token.sum


def test_messages_without_tokens_count_for_nothing() -> None:
    """What brings no token does not begin the time between tokens anew."""
    meter = RequestMeter()
    clock = TokenClock(meter, began=0.0)
    for now, tokens in ((1.0, 1), (2.0, 1), (3.0, 2)):
        clock.arrived(now, tokens)
    assert (1, 2.0) == (sum(meter.inter_token.counts), meter.inter_token.sum)
