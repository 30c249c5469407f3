"""A pool over connections that the test makes and breaks, in virtual time: who is served, and what is logged."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_sidecar.bridge import aio_checkpoint, aio_sleep, run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, Overloaded
from trio_sidecar.transport import fastpath, waiting
from trio_sidecar.transport import pool as pool_module
from trio_sidecar.transport.connect import StartupError
from trio_sidecar.transport.connection import ConnectionState
from trio_sidecar.transport.pool import open_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

    from trio_sidecar.transport.pool import Lease, Pool

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

WHERE = {"peer": "the engine", "endpoint": "engine:50051"}


@attrs.define(eq=False)
class FakeConnection:
    """A connection as the pool sees it."""

    on_change: Callable[[Any], None]
    state: ConnectionState = ConnectionState.READY
    stream_limit: int = 3
    open_streams: int = 0
    heard: int = 0
    reason: str = ""
    too_many_pings: bool = False
    closed: trio.Event = attrs.field(factory=trio.Event)
    closes: bool = True

    def end(self, reason: str, state: ConnectionState = ConnectionState.CLOSED) -> None:
        """Be lost, or drain."""
        self.state, self.reason = state, reason
        if state is ConnectionState.CLOSED:
            self.closed.set()
        self.on_change(self)

    def close(self, reason: str) -> None:
        """Be closed by the pool."""
        self.state, self.reason = ConnectionState.CLOSED, reason
        if self.closes:
            self.closed.set()
        self.on_change(self)


@attrs.define(eq=False)
class Network:
    """Makes connections.

    Attributes:
        made: All of them, oldest first.
        asked: At what moments, and whether for the fast path.
        faults: Raised by the next attempts, in order; None lets one pass, a number is waited for.
        lost: How many of the next connections are lost on their way to the pool.
    """

    made: list[FakeConnection] = attrs.field(factory=list)
    asked: list[tuple[float, bool | None]] = attrs.field(factory=list)
    faults: list[Any] = attrs.field(factory=list)
    lost: int = 0
    started_at: float = attrs.field(factory=trio.current_time)

    async def aio_connect(self, settings: Any, on_change: Callable[[Any], None], *, fast: bool | None) -> Any:
        await aio_checkpoint()
        self.asked.append((round(trio.current_time() - self.started_at, 3), fast))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, float):
            await aio_sleep(fault)
        self.made.append(connection := FakeConnection(on_change))
        if self.lost:
            self.lost -= 1
            connection.end("lost on its way")
        return connection


@pytest.fixture
async def network(aio_loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Network:
    """What the pools of a test connect to."""
    await trio.lowlevel.checkpoint()
    made = Network()
    monkeypatch.setattr(pool_module, "aio_connect", made.aio_connect)
    return made


def settings(connections: int = 1, **more: Any) -> TransportSettings:
    fields: dict[str, Any] = {
        "grpc_endpoint": GrpcEndpoint.parse("engine:50051"),
        "grpc_connections": connections,
        "grpc_connect_attempt_timeout_secs": 2.0,
        "grpc_retry_interval_secs": 1.0,
        "grpc_startup_deadline_secs": 100.0,
    }
    return TransportSettings(**(fields | more))


@asynccontextmanager
async def opened(logs: Lines, connections: int = 1, **more: Any) -> AsyncIterator[Pool]:
    """A pool whose start-up is over; what that logged is forgotten."""
    async with open_pool(settings(connections, **more), peer="the engine", fast=True) as pool:
        await settle()
        logs.clear()
        yield pool


async def settle() -> None:
    """Until nothing moves any more; no time passes."""
    for _ in range(5):
        await wait_all_tasks_blocked()


async def lease(pool: Pool) -> Lease:
    return await run_aio(pool.aio_lease)


async def refused(pool: Pool) -> str:
    with pytest.raises(ConnectError) as caught:
        await lease(pool)
    return str(caught.value)


def events(logs: Lines, *names: str) -> Lines:
    return [line for line in logs if line["event"] in names]


# -- Start-up


@pytest.mark.parametrize("fast", [True, False])
async def test_every_connection_is_announced(
    autojump_clock: MockClock, network: Network, logs: Lines, fast: bool
) -> None:
    """Quietly, with peer, endpoint, slot and stream limit; all are of the kind that was asked for."""
    async with open_pool(settings(2), peer="the engine", fast=fast):
        await settle()
    assert [
        {"event": "connection_ready", "log_level": "debug", "slot": slot, "limit": 3, **WHERE} for slot in (1, 2)
    ] == events(logs, "connection_ready")
    assert [(0.0, fast)] * 2 == network.asked


@pytest.mark.parametrize(("unsupported", "fast"), [(None, True), ("h2 5.0 is installed", False)])
async def test_the_fast_path_is_taken_where_it_can_be(
    autojump_clock: MockClock,
    network: Network,
    logs: Lines,
    monkeypatch: pytest.MonkeyPatch,
    unsupported: str | None,
    fast: bool,
) -> None:
    """Where it cannot be, one warning says why and what that costs."""
    monkeypatch.setattr(fastpath, "unsupported", lambda: unsupported)
    async with open_pool(settings(2)):
        await settle()
    assert [fast] * 2 == [asked for _, asked in network.asked]
    effect = "several times the CPU per token; GOAWAY cuts streams"
    warning = {"event": "slow_transport", "log_level": "warning", "reason": unsupported, "effect": effect}
    assert ([] if fast else [warning]) == events(logs, "slow_transport")


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_an_unencrypted_way_through_the_network_is_warned_about_once(
    autojump_clock: MockClock, network: Network, logs: Lines, bootstrap: bool
) -> None:
    """By the pool that serves, and not by the one that only looks before it."""
    async with open_pool(settings(2), bootstrap=bootstrap, peer="the engine", fast=True):
        await settle()
    warning = {"event": "plaintext_connection", "log_level": "warning", "advice": "--grpc-tls", **WHERE}
    assert ([] if bootstrap else [warning]) == events(logs, "plaintext_connection")


@pytest.mark.rule("R3.6")
async def test_a_failed_start_up_names_peer_and_endpoint(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """An attempt that hangs has a cause too; the log lines say whether this was before the worker's own start."""
    network.faults = [1000.0] * 3
    with pytest.raises(StartupError) as caught:
        async with open_pool(
            settings(grpc_startup_deadline_secs=5.0), bootstrap=True, peer="the engine", fast=True
        ) as pool:
            pytest.fail(f"{pool!r} is open")
    error = caught.value
    assert ("the engine", "engine:50051", 1, 5.0, 2) == (
        error.peer, error.endpoint, error.slot, error.deadline_secs, error.attempts
    )  # fmt: skip
    assert "no connection within 2s" == error.cause
    (line,) = events(logs, "connect_attempt_failed")
    assert (True, "the engine", "engine:50051", error.cause) == (
        line["bootstrap"], line["peer"], line["endpoint"], line["error"]
    )  # fmt: skip


# -- Leases


@pytest.mark.rule("R3.13", "R3.14")
async def test_leases_are_counted_where_they_are(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """On connections that carry some, those that are idle, and in the caps of each slot."""
    async with opened(logs, 3) as pool:
        held = [await lease(pool) for _ in range(4)]
        now = pool.statistics()
        assert (3, 3, 0, (2, 2, 2)) == (now.connections, now.active, now.idle, now.stream_caps)
        assert [2, 1, 1] == sorted((slot.open_streams for slot in pool.slots), reverse=True)
        for one in held[:3]:
            with one as connection:
                assert connection is one.connection
        now = pool.statistics()
        assert (1, 2) == (now.active, now.idle)
        pool.release(held[3])


async def test_urgent_calls_wait_before_others(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """In the order of their coming; the others keep theirs."""
    served: list[str] = []

    async def take(name: str, urgent: bool) -> None:
        await run_aio(partial(pool.aio_lease, urgent=urgent))
        served.append(name)

    async with opened(logs) as pool:
        held = [await lease(pool) for _ in range(2)]
        held.append(await run_aio(partial(pool.aio_lease, urgent=True)))
        async with trio.open_nursery() as nursery:
            for name in ("one", "two", "URGENT", "AFTER"):
                nursery.start_soon(take, name, name.isupper())
                await settle()
            for one, after_it in zip(held, (["URGENT"], ["URGENT", "AFTER"], ["URGENT", "AFTER"]), strict=True):
                pool.release(one)
                await settle()
                assert after_it == served
            pool.release(held[0])
            pool.release(held[0])
            await settle()
        assert ["URGENT", "AFTER", "one", "two"] == served


async def test_no_more_calls_wait_than_may(
    autojump_clock: MockClock, network: Network, logs: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused for another worker to take, unless it is a short one; a place that is left is given again."""
    monkeypatch.setattr(waiting, "MAX_WAITING_CALLS", 2)
    async with opened(logs) as pool:
        held = [await lease(pool) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lease, pool)
            await settle()
            with pytest.raises(Overloaded) as caught:
                await lease(pool)
            assert 2 == caught.value.limit
            assert "2 calls wait for the engine at engine:50051 to take them, the most that may" == str(caught.value)
            pool.release(await run_aio(partial(pool.aio_lease, urgent=True)))
            pool.release(held[0])
            await settle()
            with trio.move_on_after(1):
                await lease(pool)
            for one in held:
                pool.release(one)


@pytest.mark.rule("R15.5")
async def test_each_replacement_is_told_of(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Whoever waits hears of the next one, and not of those before."""
    async with opened(logs) as pool:
        for at in range(2):
            with trio.move_on_after(100) as early:
                await pool.reconnected()
            assert early.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.reconnected)
                await settle()
                network.made[at].end("cut")


async def test_the_representation_counts(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Those that drain too, while there are some."""
    async with opened(logs, 2) as pool:
        await lease(pool)
        assert "<Pool the engine at engine:50051: 1 active, 1 idle, 0 queued>" == repr(pool)
        network.made[0].open_streams = 1
        network.made[0].end("GOAWAY", ConnectionState.DRAINING)
        await settle()
        assert "<Pool the engine at engine:50051: 0 active, 2 idle, 0 queued, 1 draining>" == repr(pool)
        assert (1, 1) == (pool.statistics().open_streams, pool.statistics().draining)


async def test_a_lease_on_a_lost_connection_frees_no_place_on_the_next(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """The new connection's places are counted from none."""
    async with opened(logs) as pool:
        old = await lease(pool)
        network.made[0].end("cut")
        await settle()
        new = await lease(pool)
        assert new.connection is cast("Any", network.made[1])
        assert 1 == pool.slots[0].open_streams
        pool.release(old)
        assert 1 == pool.slots[0].open_streams
        pool.release(new)
        assert 0 == pool.slots[0].open_streams


async def test_the_first_call_goes_to_the_first_slot(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """And the next ones in turn."""
    async with opened(logs, 3) as pool:
        assert [1, 2, 3, 1] == [(await lease(pool)).slot.number for _ in range(4)]


async def test_a_waiter_that_gives_up_leaves_the_queue(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """Whoever waits behind it is served next."""
    async with opened(logs) as pool:
        held = [await lease(pool) for _ in range(2)]
        served: list[Lease] = []

        async def wait() -> None:
            served.append(await lease(pool))

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(5) as scope:
                await lease(pool)
            assert (True, 0) == (scope.cancelled_caught, pool.statistics().queued)
            nursery.start_soon(wait)
            await settle()
            assert 1 == pool.statistics().queued
            pool.release(held.pop())
        assert (1, 0, 2) == (len(served), pool.statistics().queued, pool.slots[0].open_streams)


async def test_waits_for_a_connection_are_measured(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Also those that took no time."""
    await trio.sleep(100)
    async with opened(logs) as pool:
        held = [await lease(pool) for _ in range(2)]
        assert (2, 0.0) == (sum(pool.meter.wait.counts), pool.meter.wait.sum)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lease, pool)
            await trio.sleep(5)
            pool.release(held.pop())
        assert 3 == sum(pool.meter.wait.counts)
        assert pytest.approx(5.0, abs=0.01) == pool.meter.wait.sum


async def test_every_replacement_is_counted(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Of each slot, however often."""
    async with opened(logs, 2) as pool:
        for _ in range(3):
            for connection in list(network.made):
                if connection.state is ConnectionState.READY:
                    connection.end("cut")
            await settle()
        assert 6 == pool.statistics().reconnects


async def test_a_place_that_meets_a_cancel_is_given_back(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """A waiter that is cancelled in the moment it is served leaves nothing behind."""
    async with opened(logs) as pool:
        held = [await lease(pool) for _ in range(2)]

        async def aio_main() -> None:
            waiter = asyncio.ensure_future(pool.aio_lease())
            await aio_checkpoint()
            assert 1 == pool.statistics().queued
            pool.release(held.pop())
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter

        await run_aio(aio_main)
        assert (1, 0) == (pool.slots[0].open_streams, pool.statistics().queued)


# -- Loss and replacement


async def test_a_loss_and_its_repair_are_logged(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """With slot, load and reason, at the level of things that happen."""
    async with opened(logs, 2) as pool:
        network.made[1].open_streams = 2
        network.made[1].end("the peer closed the connection")
        await settle()
        assert [
            {
                "event": "connection_closed", "log_level": "info", "slot": 2, "open_streams": 2,
                "reason": "the peer closed the connection", **WHERE,
            },
            {"event": "connection_ready", "log_level": "debug", "slot": 2, "limit": 3, **WHERE},
            {"event": "connection_replaced", "log_level": "info", "slot": 2, "attempts": 1, **WHERE},
        ] == logs  # fmt: skip
        now = pool.statistics()
        assert (1, 0, 2) == (now.reconnects, now.failed_reconnects, now.idle)


async def test_a_drain_is_logged_as_one(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Not as a loss."""
    async with opened(logs):
        network.made[0].end("the peer sent GOAWAY", ConnectionState.DRAINING)
        await settle()
    (line,) = events(logs, "connection_draining", "connection_closed")
    assert ("connection_draining", "the peer sent GOAWAY") == (line["event"], line["reason"])


@pytest.mark.rule("R3.10", "FR-027", "FR-028")
async def test_an_outage_is_logged_sparingly_and_told_to_callers(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """The first failure is a warning, the same one again is only counted; then the repair with all attempts."""
    network.faults = [None, OSError(111, "refused"), OSError(111, "refused"), 1000.0, None]
    async with opened(logs) as pool:
        network.made[0].end("the peer closed the connection")
        await settle()
        refusal = "no connection to the engine at engine:50051: [Errno 111] refused"
        assert refusal == await refused(pool)
        await trio.sleep(20)
        assert [
            {
                "event": "reconnect_failed", "log_level": "warning", "slot": 1, "attempt": attempt,
                "suppressed": suppressed, "error": error, **WHERE,
            }
            for attempt, suppressed, error in ((1, 0, "[Errno 111] refused"), (3, 1, "no HTTP/2 connection within 2 s"))
        ] == events(logs, "reconnect_failed")  # fmt: skip
        assert [
            {"event": "connection_replaced", "log_level": "info", "slot": 1, "attempts": 4, **WHERE}
        ] == events(logs, "connection_replaced")  # fmt: skip
        now = pool.statistics()
        assert (1, 3, 1) == (now.reconnects, now.failed_reconnects, now.idle)


@pytest.mark.rule("FR-015", "FR-028")
async def test_calls_wait_for_the_first_try_only(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """While that is under way a call waits; when it has failed this and later ones fail, until a connection is back."""
    network.faults = [None, 1.0, OSError("refused")]
    async with opened(logs, grpc_retry_interval_secs=5.0) as pool:
        network.made[0].end("cut")
        pool.release(await lease(pool))
        assert 2 == len(network.made)
        network.made[1].end("cut again")
        assert "no connection to the engine at engine:50051: refused" == await refused(pool)
        await trio.sleep(6)
        pool.release(await lease(pool))
        network.faults = [0.5]
        network.made[2].end("and again")
        pool.release(await lease(pool))


async def test_a_reason_that_nobody_gave_is_left_out(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Before anything was lost there is no cause to tell."""
    async with opened(logs) as pool:
        pool.slots[0].connection, pool.slots[0].hopeful = None, False
        assert "no connection to the engine at engine:50051" == await refused(pool)


async def test_a_connection_that_is_lost_on_its_way_is_replaced(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """The pool has not heard of its loss, because it did not know it yet."""
    network.lost = 1
    async with open_pool(settings(), peer="the engine", fast=True) as pool:
        await settle()
        assert 2 == len(network.made)
        assert (1, 1) == (pool.statistics().reconnects, pool.statistics().idle)
    (line,) = events(logs, "connection_closed")
    assert (1, "lost on its way") == (line["slot"], line["reason"])


@pytest.mark.rule("FR-029")
async def test_slots_spread_their_tries_over_half_the_pause(
    autojump_clock: MockClock, network: Network, logs: Lines
) -> None:
    """The first of four after five eighths of the interval, the last after all of it."""
    async with opened(logs, 4):
        network.asked.clear()
        network.faults = [OSError("refused")] * 100
        for connection in network.made:
            connection.end("cut")
        await trio.sleep(1.5)
    assert [0.0, 0.0, 0.0, 0.0, 0.625, 0.75, 0.875, 1.0] == [moment for moment, _ in network.asked]


async def test_pauses_double_up_to_five_seconds(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """So that an engine that comes back soon is found soon, and one that stays away is not asked in vain."""
    async with opened(logs):
        network.asked.clear()
        network.faults = [OSError("refused")] * 100
        network.made[0].end("cut")
        await trio.sleep(18)
    assert [0.0, 1.0, 3.0, 7.0, 12.0, 17.0] == [moment for moment, _ in network.asked]


@pytest.mark.rule("FR-099")
@pytest.mark.parametrize("complains", [False, True])
async def test_a_peer_that_complains_of_pings_gets_fewer(
    autojump_clock: MockClock, network: Network, logs: Lines, complains: bool
) -> None:
    """The interval doubles with each complaint."""
    async with opened(logs, keepalive_secs=10.0):
        network.made[0].too_many_pings = complains
        network.made[0].end("GOAWAY")
        await settle()
    warning = {"event": "keepalive_slowed_down", "log_level": "warning", "interval_secs": 20.0}
    assert ([warning] if complains else []) == events(logs, "keepalive_slowed_down")


# -- The end


async def test_closing_ends_everything_and_is_no_loss(autojump_clock: MockClock, network: Network, logs: Lines) -> None:
    """Connections are told why, waiters fail, nothing is replaced and nothing logged."""
    failures: list[str] = []

    async def wait(pool: Pool) -> None:
        failures.append(await refused(pool))

    async with trio.open_nursery() as nursery, opened(logs, 2) as pool:
        for _ in range(4):
            await lease(pool)
        nursery.start_soon(wait, pool)  # noqa: ASYNC111 - that the pool closes first is what is tested
        await settle()
    assert ["the connection pool to the engine is closing"] * 2 == [made.reason for made in network.made]
    closed = "the connection pool to the engine at engine:50051 is closed"
    assert ([closed], closed) == (failures, await refused(pool))
    assert ([], 2) == (logs, len(network.made))


@pytest.mark.parametrize(("closes", "seconds"), [(True, 0.0), (False, 1.0)])
async def test_sockets_have_a_second_to_close(
    autojump_clock: MockClock, network: Network, logs: Lines, closes: bool, seconds: float
) -> None:
    """Also if the pool is cancelled; one that does not close keeps nobody longer."""
    with trio.CancelScope() as scope:
        async with opened(logs, 2):
            for made in network.made:
                made.closes = closes
            started_at = trio.current_time()
            scope.cancel()
    assert pytest.approx(seconds, abs=0.01) == trio.current_time() - started_at
