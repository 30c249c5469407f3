"""What the start-up of a pool says, to the letter; its policy is tried in the scenarios (spec 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, InvalidConfig
from trio_sidecar.transport.connect import FailureLog, StartupError, connect_slots

if TYPE_CHECKING:
    from trio.testing import MockClock

    Lines = list[dict[str, Any]]

SETTINGS = TransportSettings(
    grpc_endpoint=GrpcEndpoint.parse("engine:50051"),
    grpc_connections=1,
    grpc_connect_attempt_timeout_secs=2.0,
    grpc_retry_interval_secs=0.70004,
    grpc_startup_deadline_secs=3.5,
)


async def fail(slot: int, timeout: float) -> None:  # noqa: ASYNC109 - the policy's interface
    """Fail after a third of a second."""
    await trio.sleep(1 / 3)
    raise ConnectError("refused") from OSError(111, "not there")


async def started(attempt: Any, *, bootstrap: bool = False, **changes: Any) -> StartupError:
    settings = attrs.evolve(SETTINGS, **changes)
    with pytest.raises(StartupError) as caught:
        await connect_slots(
            peer="the engine", endpoint="engine:50051", settings=settings, bootstrap=bootstrap, attempt=attempt
        )
    return caught.value


@pytest.mark.rule("R3.6", "R3.7")
async def test_the_error_has_all_that_its_sentence_says(autojump_clock: MockClock) -> None:
    """As attributes too, for whoever handles it; its cause is the last failure."""
    await trio.sleep(100)
    error = await started(fail)
    assert {
        "peer": "the engine",
        "endpoint": "engine:50051",
        "slot": 1,
        "deadline_secs": 3.5,
        "attempts": 4,
        "elapsed_secs": pytest.approx(3.5),
        "cause": "refused: [Errno 111] not there",
    } == vars(error)
    assert (
        "cannot connect to the engine at engine:50051: pool slot 1 failed within 3.5s after 4 attempts "
        "(3.5s elapsed): refused: [Errno 111] not there"
    ) == str(error)
    assert isinstance(error.__cause__, ConnectError)


@pytest.mark.rule("R3.10", "FR-033")
@pytest.mark.parametrize(("bootstrap", "since"), [(False, 0), (False, 100), (True, 100)])
async def test_lines_of_a_start_up(autojump_clock: MockClock, logs: Lines, bootstrap: bool, since: float) -> None:
    """Times are rounded to milliseconds; what the start-up waits for is said at once, not only after a while."""
    await trio.sleep(since)
    await started(fail, bootstrap=bootstrap)
    failed, waiting = logs
    fields = {
        "peer": "the engine",
        "endpoint": "engine:50051",
        "slot": 1,
        "attempt": 1,
        "elapsed_secs": 0.333,
        "remaining_secs": 3.167,
        "retry_interval_secs": 0.70004,
        "bootstrap": bootstrap,
        "error": "refused: [Errno 111] not there",
    }
    assert {"event": "connect_attempt_failed", "log_level": "debug", "suppressed": 0, **fields} == failed
    assert {"event": "waiting_for_peer", "log_level": "info", **fields} == waiting


@pytest.mark.rule("R3.3")
async def test_an_attempt_that_hangs_has_a_cause(autojump_clock: MockClock) -> None:
    """The time that it was given."""

    async def hang(slot: int, timeout: float) -> None:  # noqa: ASYNC109 - the policy's interface
        await trio.sleep(1000)

    error = await started(hang)
    assert ("no connection within 2s", 2) == (error.cause, error.attempts)
    error = await started(hang, grpc_connect_attempt_timeout_secs=60.0)
    assert ("the attempt exceeded the startup deadline", 1) == (error.cause, error.attempts)


async def test_a_wrong_setting_ends_the_start_up_at_once(autojump_clock: MockClock) -> None:
    """No retry makes it right."""
    tries = []

    async def refuse(slot: int, timeout: float) -> None:  # noqa: ASYNC109 - the policy's interface
        await trio.lowlevel.checkpoint()
        tries.append(slot)
        raise InvalidConfig("--grpc-ca-cert", "cannot be read")

    with pytest.raises(InvalidConfig, match="--grpc-ca-cert"):
        await connect_slots(peer="v", endpoint="e", settings=SETTINGS, bootstrap=False, attempt=refuse)
    assert [1] == tries


@pytest.mark.rule("R3.1")
async def test_what_the_attempts_return_is_in_the_order_of_slots(autojump_clock: MockClock) -> None:
    """Not in the order in which they were ready."""

    async def connect(slot: int, timeout: float) -> str:  # noqa: ASYNC109 - the policy's interface
        await trio.sleep(1 / slot)
        return f"slot {slot}"

    settings = attrs.evolve(SETTINGS, grpc_connections=3)
    made = await connect_slots(peer="v", endpoint="e", settings=settings, bootstrap=False, attempt=connect)
    assert ["slot 1", "slot 2", "slot 3"] == made


@pytest.mark.rule("R3.8")
async def test_the_first_of_the_later_slots_that_fails_says_why(autojump_clock: MockClock) -> None:
    """Though another one fails in the same moment."""
    failed = []

    async def refuse(slot: int, timeout: float) -> None:  # noqa: ASYNC109 - the policy's interface
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
        if slot > 1:
            failed.append(slot)
            raise InvalidConfig("--grpc-ca-cert", f"slot {slot}")

    settings = attrs.evolve(SETTINGS, grpc_connections=3)
    with pytest.raises(InvalidConfig) as caught:
        await connect_slots(peer="v", endpoint="e", settings=settings, bootstrap=False, attempt=refuse)
    assert {2, 3} == set(failed)
    assert f"slot {failed[0]}" in str(caught.value)


@pytest.mark.rule("R3.10")
def test_failures_that_are_held_back() -> None:
    """The same text is due again exactly when its time is over, with how many there were; another is at once."""
    failures = FailureLog(30)
    assert [0, None, None, None, 3, None, 1, 0] == [
        failures.admit(text, moment)
        for text, moment in (("a", 5), ("a", 6), ("a", 7), ("a", 34), ("a", 35), ("a", 36), ("b", 37), ("a", 38))
    ]
