from __future__ import annotations

import pytest

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.requests.cancel import CancelAfterFirstToken, cancel_policy
from trio_sidecar.testing.fake_engine import finish, tokens
from trio_sidecar.wire import GenerateResponse, PromptInfo


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1


@pytest.mark.rule("R10.6", "R10.7", "R10.9")
@pytest.mark.parametrize(
    ("response", "ready", "rings"),
    [
        (GenerateResponse(), False, 0),
        (GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=3)), False, 0),
        (tokens(), False, 0),
        (tokens(text="buffered"), False, 0),
        (tokens(42), True, 1),
        (tokens(0), True, 1),
        (finish(42), True, 1),
        (finish(total=0), True, 0),
    ],
    ids=["empty", "prompt info", "no token", "text only", "token", "token 0", "token and end", "end only"],
)
def test_what_counts_as_the_first_token(response: GenerateResponse, ready: bool, rings: int) -> None:
    """Tokens or the end let a cancel act; only tokens are announced."""
    bell = Bell()
    policy = CancelAfterFirstToken(bell.ring)
    assert not policy.ready()
    policy.observe(response)
    assert (ready, rings) == (policy.ready(), bell.rings)


@pytest.mark.rule("R10.7")
def test_the_first_token_is_announced_once() -> None:
    """Later tokens are nothing new, and a policy that is ready stays so."""
    bell = Bell()
    policy = CancelAfterFirstToken(bell.ring)
    for response in (tokens(), tokens(1), tokens(2), tokens(), finish(3, total=3)):
        policy.observe(response)
    assert policy.ready()
    assert 1 == bell.rings


@pytest.mark.rule("10.1", "R10.5")
@pytest.mark.parametrize("mode", list(DisaggregationMode), ids=lambda mode: mode.value)
def test_only_decode_holds_a_cancel_back(mode: DisaggregationMode) -> None:
    """A cancel acts at once in every other role, and nothing is announced there."""
    bell = Bell()
    policy = cancel_policy(mode, bell.ring)
    decode = mode is DisaggregationMode.DECODE
    assert decode is not policy.ready()
    policy.observe(tokens(42))
    assert policy.ready()
    assert int(decode) == bell.rings


def test_requests_do_not_share_a_policy() -> None:
    """What one decode request has seen does not count for another."""
    first, second = (cancel_policy(DisaggregationMode.DECODE, Bell().ring) for _ in range(2))
    first.observe(tokens(42))
    assert (True, False) == (first.ready(), second.ready())
