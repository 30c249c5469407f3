"""The start-up policy of a pool in virtual time (spec 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trio

from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, ErrorKind, InvalidConfig
from trio_sidecar.transport.connect import FailureLog, StartupError, connect_slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

ENDPOINT = "127.0.0.1:50051"


def settings(
    connections: int = 3, attempt: float = 0.08, retry: float = 0.01, deadline: float = 0.1
) -> TransportSettings:
    return TransportSettings(
        grpc_endpoint=GrpcEndpoint.parse(ENDPOINT),
        grpc_connections=connections,
        grpc_connect_attempt_timeout_secs=attempt,
        grpc_retry_interval_secs=retry,
        grpc_startup_deadline_secs=deadline,
    )


class Attempts:
    """Records what the policy asked for; ``act`` decides what an attempt does."""

    def __init__(self, act: Callable[[int, int], Awaitable[None] | None]) -> None:
        self.act = act
        self.seen: list[tuple[int, float]] = []
        self.at: list[float] = []

    async def __call__(self, slot: int, timeout: float) -> int:  # noqa: ASYNC109 - the policy's interface
        self.seen.append((slot, round(timeout, 9)))
        self.at.append(trio.current_time())
        if (acting := self.act(slot, len(self.seen))) is not None:
            await acting
        return slot


async def connect(attempts: Attempts, of: TransportSettings) -> list[int]:
    return await connect_slots(peer="vLLM", endpoint=ENDPOINT, settings=of, bootstrap=False, attempt=attempts)


async def connect_failing(attempts: Attempts, of: TransportSettings) -> StartupError:
    with pytest.raises(StartupError) as caught:
        await connect(attempts, of)
    return caught.value


@pytest.mark.rule("R3.1", "R3.3", "R3.4", "R3.5")
async def test_first_attempt_fails_then_all_succeed(autojump_clock: MockClock) -> None:
    """One failed attempt costs one retry interval, and results come in slot order."""

    def act(slot: int, number: int) -> None:
        if number == 1:
            reason = "not yet"
            raise ConnectError(reason)

    attempts = Attempts(act)
    start = trio.current_time()
    assert [1, 2, 3] == await connect(attempts, settings())
    assert [(1, 0.08), (1, 0.08), (2, 0.08), (3, 0.08)] == sorted(attempts.seen)
    assert pytest.approx(0.010) == trio.current_time() - start


@pytest.mark.rule("R3.2", "R3.3", "R3.6", "R3.7")
async def test_later_slots_share_the_deadline_of_the_first(autojump_clock: MockClock) -> None:
    """Slots that hang get what the first slot left of the deadline, and the error says that nothing ever answered."""

    async def act(slot: int, number: int) -> None:
        await trio.sleep(0.070 if slot == 1 else 3600)

    attempts = Attempts(act)
    start = trio.current_time()
    error = await connect_failing(attempts, settings())
    assert pytest.approx(0.100) == trio.current_time() - start
    assert [(1, 0.08), (2, 0.03), (3, 0.03)] == sorted(attempts.seen)
    assert ErrorKind.CANNOT_CONNECT is error.kind
    assert "exceeded the startup deadline" in str(error)
    assert "pool slot 2" in str(error) or "pool slot 3" in str(error)
    assert 1 == error.attempts


@pytest.mark.rule("R3.4", "R3.6", "R3.7")
async def test_retry_interval_is_cut_by_the_deadline(autojump_clock: MockClock) -> None:
    """A retry interval longer than the deadline ends at the deadline, with the cause of the only attempt."""

    def act(slot: int, number: int) -> None:
        reason = "peer rejected connection"
        raise ConnectError(reason)

    attempts = Attempts(act)
    start = trio.current_time()
    error = await connect_failing(attempts, settings(retry=1.0))
    assert pytest.approx(0.100) == trio.current_time() - start
    assert "peer rejected connection" in str(error)
    assert "after 1 attempts" in str(error)
    assert "within 100ms" in str(error)
    assert 1 == len(attempts.seen)


@pytest.mark.rule("R3.6")
async def test_message_names_all_that_an_operator_needs(autojump_clock: MockClock) -> None:
    """The error is one line with peer, endpoint, slot, deadline, attempts, elapsed time and cause."""

    def act(slot: int, number: int) -> None:
        raise OSError(111, "Connection refused")

    error = await connect_failing(Attempts(act), settings(retry=0.04))
    for part in ("vLLM", ENDPOINT, "pool slot 1", "within 100ms", "after 3 attempts", "100ms elapsed", "refused"):
        assert part in str(error)
    assert "\n" not in str(error)
    assert (1, 3, 0.1) == (error.slot, error.attempts, error.deadline_secs)
    assert pytest.approx(0.1) == error.elapsed_secs


@pytest.mark.rule("R3.7")
async def test_cause_is_the_last_failure_with_its_sources(autojump_clock: MockClock) -> None:
    """The last failure counts, and its chain of causes is joined by colons."""

    def act(slot: int, number: int) -> None:
        try:
            raise OSError(f"cable {number}")
        except OSError as error:
            reason = f"handshake {number}"
            raise ConnectError(reason) from error

    error = await connect_failing(Attempts(act), settings(retry=0.06))
    assert "handshake 2: cable 2" in str(error)
    assert "handshake 1" not in str(error)


@pytest.mark.rule("R3.7")
async def test_a_failure_before_a_hanging_attempt_stays_the_cause(autojump_clock: MockClock) -> None:
    """If the deadline cuts an attempt, the failure of an earlier one says more than the cut."""

    async def act(slot: int, number: int) -> None:
        if number > 1:
            await trio.sleep_forever()
        reason = "no route"
        raise ConnectError(reason)

    error = await connect_failing(Attempts(act), settings(attempt=60))
    assert "no route" in str(error)
    assert "after 2 attempts" in str(error)


@pytest.mark.rule("R3.3")
async def test_an_attempt_that_overstays_its_time_has_failed(autojump_clock: MockClock) -> None:
    """An attempt that ignores its timeout is ended, and the next one is made."""

    async def act(slot: int, number: int) -> None:
        if number == 1:
            await trio.sleep_forever()

    attempts = Attempts(act)
    start = trio.current_time()
    assert [1] == await connect(attempts, settings(connections=1, attempt=5, retry=1, deadline=60))
    assert pytest.approx(6) == trio.current_time() - start
    assert 2 == len(attempts.seen)


@pytest.mark.rule("R3.1")
async def test_later_slots_start_together_after_the_first(autojump_clock: MockClock) -> None:
    """Slot 1 is connected alone; the others then take as long together as one of them."""

    async def act(slot: int, number: int) -> None:
        await trio.sleep(2)

    attempts = Attempts(act)
    start = trio.current_time()
    assert list(range(1, 9)) == await connect(attempts, settings(connections=8, attempt=5, deadline=60))
    assert pytest.approx(4) == trio.current_time() - start
    assert [pytest.approx(0), *[pytest.approx(2)] * 7] == [at - start for at in attempts.at]


@pytest.mark.rule("R3.8")
async def test_first_failing_slot_ends_the_others(autojump_clock: MockClock) -> None:
    """The first slot that gives up fails the pool with its own error, not in a group, and the others are cancelled."""
    ended: list[int] = []

    async def act(slot: int, number: int) -> None:
        if slot == 3:
            raise InvalidConfig("--tls", "no such file")
        if slot != 1:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(slot)

    with pytest.raises(InvalidConfig, match="no such file"):
        await connect(Attempts(act), settings(connections=4, attempt=50, deadline=60))
    assert [2, 4] == sorted(ended)


async def test_cancelling_the_start_up_cancels_its_attempts(autojump_clock: MockClock) -> None:
    """A start-up is left at once when its caller is cancelled, and no attempt survives."""
    running: set[int] = set()

    async def act(slot: int, number: int) -> None:
        running.add(slot)
        try:
            await trio.sleep(0 if slot == 1 else 1000)
        finally:
            running.discard(slot)

    start = trio.current_time()
    with trio.move_on_after(7) as scope:
        await connect(Attempts(act), settings(attempt=5000, deadline=9000))
    assert scope.cancelled_caught
    assert pytest.approx(7) == trio.current_time() - start
    assert set() == running


async def test_a_fault_in_the_program_is_not_retried(autojump_clock: MockClock) -> None:
    """Only failures of the world are retried; a bug shows itself at once."""

    def act(slot: int, number: int) -> None:
        reason = "bug"
        raise TypeError(reason)

    attempts = Attempts(act)
    with pytest.raises(TypeError, match="bug"):
        await connect(attempts, settings())
    assert 1 == len(attempts.seen)


@pytest.mark.rule("R3.9", "R2.9")
@pytest.mark.parametrize(
    ("change", "named"),
    [({"retry": 2.0**64}, "--grpc-retry-interval-secs"), ({"deadline": 2.0**64}, "--grpc-startup-deadline-secs")],
)
def test_times_off_the_clock_are_refused(change: dict[str, Any], named: str) -> None:
    """A time that the clock cannot represent is refused by name, before there can be any attempt."""
    with pytest.raises(InvalidConfig, match=named) as caught:
        settings(**change)
    assert ErrorKind.INVALID_ARGUMENT is caught.value.kind
    assert "clock" in str(caught.value)


@pytest.mark.rule("R3.10")
async def test_repeated_failures_are_logged_sparingly(autojump_clock: MockClock) -> None:
    """An unchanged failure is logged again after 30 s, a new one at once; what was held back is counted."""

    def act(slot: int, number: int) -> None:
        reason = "refused" if number < 40 else "reset"
        raise ConnectError(reason)

    with structlog.testing.capture_logs() as logs:
        await connect_failing(Attempts(act), settings(connections=1, attempt=1, retry=1, deadline=45.5))
    lines = [line for line in logs if line["event"] == "connect_attempt_failed"]
    assert [(1, "refused", 0), (31, "refused", 29), (40, "reset", 8)] == [
        (line["attempt"], line["error"], line["suppressed"]) for line in lines
    ]
    assert {"debug"} == {line["log_level"] for line in lines}
    assert {"peer", "endpoint", "slot", "attempt", "elapsed_secs", "remaining_secs", "retry_interval_secs"} <= set(
        lines[0]
    )


@pytest.mark.rule("FR-033")
async def test_an_operator_sees_what_the_start_up_waits_for(autojump_clock: MockClock) -> None:
    """Every ten seconds a line tells the reason of the wait and the time that is left."""

    def act(slot: int, number: int) -> None:
        reason = "refused"
        raise ConnectError(reason)

    with structlog.testing.capture_logs() as logs:
        await connect_failing(Attempts(act), settings(connections=1, attempt=1, retry=1, deadline=45))
    lines = [line for line in logs if line["event"] == "waiting_for_peer"]
    assert [45, 35, 25, 15, 5] == [line["remaining_secs"] for line in lines]
    assert {"refused"} == {line["error"] for line in lines}


@pytest.mark.rule("R3.10")
def test_failure_log_is_a_pure_decision() -> None:
    """A line is due for a new text or after the interval; the count of held-back failures goes with it."""
    log = FailureLog(30)
    asked = [("a", 0), ("a", 1), ("a", 29.9), ("a", 30), ("b", 31), ("a", 32), ("a", 62)]
    assert [0, None, None, 2, 0, 0, 0] == [log.admit(text, now) for text, now in asked]
