"""The pool of connections to one peer: which stream goes where, who waits, and how lost connections come back.

The decision is :func:`~trio_sidecar.transport.balance.choose`, a pure function over what each slot reports; everything
here feeds it and acts on its answers. Rules that a reader should know:

- A call takes the least-loaded connection; equals take turns, so an idle pool is used round robin (R3.13).
- No connection carries as many streams as its peer announced, so HTTP/2's own queue, which can hang for ever when the
  connection dies (E3), is never used. Calls over the cap wait here, first come first served.
- Short calls, which ask for health or order something, are not to wait behind requests: they go first, and may use the
  stream that requests leave free. Otherwise an engine would seem to be away when it is only full.
- So many calls may wait and no more; the next is refused for another worker to take.
- Calls wait only while a connection is up or the first try to replace one is under way. When no slot is, all waiters
  fail at once, and so do later calls until a connection is back (FR-015, FR-028).
- Each slot has one keeper task, so there is one reconnect at a time per slot; it backs off while the peer is away
  (FR-027).
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import aio_now, run_aio
from trio_sidecar.errors import ConnectError, SidecarError, cause_chain
from trio_sidecar.transport import fastpath
from trio_sidecar.transport.balance import PoolStatistics, choose
from trio_sidecar.transport.connect import FailureLog, connect_slots
from trio_sidecar.transport.connection import Connection, ConnectionState
from trio_sidecar.transport.dial import aio_connect, connection_settings
from trio_sidecar.transport.keepalive import Keepalive
from trio_sidecar.transport.slot import Slot
from trio_sidecar.transport.waiting import Line, Waiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from trio_sidecar.config import TransportSettings

__all__ = ["Lease", "Pool", "open_pool"]

_MAX_RECONNECT_INTERVAL_SECS = 5.0
_CLOSE_SECS = 1.0

log = structlog.get_logger("trio_sidecar.transport.pool")


@attrs.define(eq=False)
class Lease:
    """The right to have one stream on a connection; a plain context manager that gives it back."""

    pool: Pool
    slot: Slot
    connection: Connection

    def __enter__(self) -> Connection:
        """The connection."""
        return self.connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the place back."""
        self.pool.release(self)


class Pool:
    """Connections to one peer; open one with :func:`open_pool`."""

    def __init__(self, settings: TransportSettings, *, peer: str, bootstrap: bool, fast: bool | None) -> None:
        self.settings = settings
        self._connection_settings = connection_settings(settings)
        self.meter = self._connection_settings.meter
        self.peer = peer
        self._endpoint = settings.grpc_endpoint.label
        self._bootstrap = bootstrap
        self._fast = fast
        self.slots = [Slot(number) for number in range(1, settings.grpc_connections + 1)]
        self._waiting = Line()
        self._connections: set[Connection] = set()
        self._last = -1
        self._reconnects = 0
        self._failed_reconnects = 0
        self._cause = ""
        self._peer_is_back = trio.Event()
        self._replaced = trio.Event()
        self._keepalive = Keepalive(settings.keepalive_secs, settings.keepalive_timeout_secs)
        self._closing = False

    def __len__(self) -> int:
        """The number of configured connections (R3.14)."""
        return len(self.slots)

    def __repr__(self) -> str:
        """For example ``<Pool vLLM at 127.0.0.1:50051: 3 active, 5 idle, 0 queued>``."""
        now = self.statistics()
        more = f", {now.draining} draining" if now.draining else ""
        return (
            f"<Pool {self.peer} at {self._endpoint}: {now.active} active, {now.idle} idle, {now.queued} queued{more}>"
        )

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        ready = [slot for slot in self.slots if slot.connection is not None]
        connections = tuple(self._connections)  # a copy, because metrics are asked for on another thread
        return PoolStatistics(
            connections=len(self.slots),
            active=sum(slot.open_streams > 0 for slot in ready),
            idle=sum(slot.open_streams == 0 for slot in ready),
            draining=sum(connection.state is ConnectionState.DRAINING for connection in connections),
            open_streams=sum(connection.open_streams for connection in connections),
            queued=len(self._waiting),
            reconnects=self._reconnects,
            failed_reconnects=self._failed_reconnects,
            stream_caps=tuple(slot.load().cap for slot in self.slots),
        )

    # -- Calls (asyncio-flavoured)

    async def aio_lease(self, *, urgent: bool = False) -> Lease:
        """Wait for a connection with room for one more stream, and reserve it.

        Args:
            urgent: Whether the call is a short one, which goes before those that wait.

        Raises:
            ConnectError: No connection is up and none can be made at present, or the pool is closing.
            Overloaded: Too many calls wait already.
        """
        if (urgent or not self._waiting) and (lease := self._lease_now(urgent=urgent)) is not None:
            self.meter.wait.observe(0.0)
            return lease
        if (error := self._hopeless()) is not None:
            raise error
        waiter = Waiter(urgent)
        self._waiting.join(waiter, f"{self.peer} at {self._endpoint}")
        began = aio_now()
        try:
            await waiter.ready.aio_wait()
        except BaseException:
            if waiter.lease is not None:
                self.release(waiter.lease)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise
        finally:
            self.meter.wait.observe(aio_now() - began)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.lease is not None  # noqa: S101
        return waiter.lease

    def release(self, lease: Lease) -> None:
        """Give a reservation back."""
        if lease.slot.connection is lease.connection:
            lease.slot.open_streams -= 1
        self._assign()

    def _lease_now(self, *, urgent: bool) -> Lease | None:
        index = choose([slot.load(urgent=urgent) for slot in self.slots], self._last)
        if index is None:
            return None
        self._last = index
        slot = self.slots[index]
        slot.open_streams += 1
        assert slot.connection is not None  # noqa: S101
        return Lease(self, slot, slot.connection)

    def _hopeless(self) -> ConnectError | None:
        """The error for calls that nothing can serve: none up, none on its way."""
        if self._closing:
            reason = f"the connection pool to {self.peer} at {self._endpoint} is closed"
            return ConnectError(reason)
        if any(slot.hopeful for slot in self.slots):
            return None
        cause = f": {self._cause}" if self._cause else ""
        reason = f"no connection to {self.peer} at {self._endpoint}{cause}"
        return ConnectError(reason)

    def _assign(self) -> None:
        """Serve waiters in order while there is room; fail them all when there is no hope."""
        while self._waiting and (lease := self._lease_now(urgent=self._waiting[0].urgent)) is not None:
            waiter = self._waiting.popleft()
            waiter.lease = lease
            waiter.ready.set()
        if self._waiting and (error := self._hopeless()) is not None:
            for waiter in self._waiting:
                waiter.error = error
                waiter.ready.set()
            self._waiting.clear()

    # -- Connections

    def _changed(self, connection: Connection) -> None:
        """A connection's state, limit or load has changed; called from asyncio, so everything here is synchronous."""
        if connection.state is not ConnectionState.READY:
            for slot in self.slots:
                if slot.connection is connection:
                    self._vacate(slot, connection)
        self._assign()

    def _vacate(self, slot: Slot, connection: Connection) -> None:
        slot.connection = None
        slot.open_streams = 0
        slot.lost.set()
        if connection.too_many_pings:
            self._keepalive.slow_down()
        if not self._closing:
            log.info(
                "connection_" + connection.state.value,
                peer=self.peer,
                endpoint=self._endpoint,
                slot=slot.number,
                open_streams=connection.open_streams,
                reason=connection.reason,
            )

    async def connect_all(self) -> None:
        """Fill every slot after the start-up policy (Trio-flavoured)."""
        await connect_slots(
            peer=self.peer,
            endpoint=str(self._endpoint),
            settings=self.settings,
            bootstrap=self._bootstrap,
            attempt=self._attempt,
        )

    async def _attempt(self, number: int, timeout: float) -> None:  # noqa: ASYNC109 - its share of the deadline (R3.3)
        slot = self.slots[number - 1]
        with trio.move_on_after(timeout) as scope:
            connection = await run_aio(self._aio_attempt)
        if scope.cancelled_caught:
            reason = f"no HTTP/2 connection within {timeout:g} s"
            raise ConnectError(reason)
        slot.lost = trio.Event()
        slot.hopeful = True
        slot.connection = connection
        self.note_peer_is_back()
        if connection.state is not ConnectionState.READY:  # lost on its way here
            self._vacate(slot, connection)
        log.debug(
            "connection_ready", peer=self.peer, endpoint=self._endpoint, slot=number, limit=connection.stream_limit
        )
        self._assign()

    def note_peer_is_back(self) -> None:
        """End the pauses of the slots that are about to try again: the peer has just answered another."""
        self._peer_is_back.set()
        self._peer_is_back = trio.Event()

    async def _aio_attempt(self) -> Connection:
        connection = await aio_connect(self._connection_settings, self._changed, fast=self._fast)
        # Here, so that one which a cancel overtakes on its way back is closed with the pool.
        self._connections.add(connection)
        return connection

    async def keep(self, slot: Slot) -> None:
        """Replace the slot's connection whenever it is lost or drains (Trio-flavoured)."""
        while True:
            await slot.lost.wait()
            await self._replace(slot)
            self._reconnects += 1
            self._replaced.set()
            self._replaced = trio.Event()

    async def reconnected(self) -> None:
        """Return when the next connection has been replaced, perhaps by one to another life of the peer."""
        await self._replaced.wait()

    async def keep_alive(self) -> None:
        """Give up connections whose peer has fallen silent (Trio-flavoured)."""
        await self._keepalive.run(lambda: self._connections)

    async def _replace(self, slot: Slot) -> None:
        failures = FailureLog()
        attempts = 0
        pause = self.settings.grpc_retry_interval_secs
        while True:
            attempts += 1
            self._connections = {at for at in self._connections if not at.closed.is_set()}
            try:
                await self._attempt(slot.number, self.settings.grpc_connect_attempt_timeout_secs)
            except (OSError, SidecarError) as error:
                self._failed_reconnects += 1
                self._cause = cause_chain(error)
                slot.hopeful = False
                self._assign()
                if (suppressed := failures.admit(self._cause, trio.current_time())) is not None:
                    log.warning(
                        "reconnect_failed",
                        peer=self.peer,
                        endpoint=self._endpoint,
                        slot=slot.number,
                        attempt=attempts,
                        suppressed=suppressed,
                        error=self._cause,
                    )
                # Slots lost together must not try again in step: spread out, one of them soon sees the peer return.
                with trio.move_on_after(pause * (1 + slot.number / len(self.slots)) / 2):
                    await self._peer_is_back.wait()
                pause = max(pause, min(2 * pause, _MAX_RECONNECT_INTERVAL_SECS))
            else:
                log.info(
                    "connection_replaced", peer=self.peer, endpoint=self._endpoint, slot=slot.number, attempts=attempts
                )
                return

    async def aclose(self) -> None:
        """Close all connections and wait, within limits, until their sockets are gone (Trio-flavoured)."""
        self._closing = True
        for connection in list(self._connections):
            connection.close(f"the connection pool to {self.peer} is closing")
        self._assign()
        with trio.move_on_after(_CLOSE_SECS, shield=True):
            for connection in self._connections:
                await connection.closed.wait()


@asynccontextmanager
async def open_pool(
    settings: TransportSettings, *, bootstrap: bool = False, peer: str = "vLLM", fast: bool | None = None
) -> AsyncIterator[Pool]:
    """Connect every slot after the start-up policy, then keep them connected while the block runs (Trio-flavoured).

    Args:
        settings: The peer, the number of connections, and times.
        bootstrap: See :func:`~trio_sidecar.transport.connect.connect_slots`.
        peer: Name of the peer, for messages.
        fast: Force or forbid the fast path; by default it is used where the installed versions allow it.

    Raises:
        InvalidConfig: A file of the TLS settings cannot be used.
        StartupError: Before the block: a slot could not be connected before the deadline.
    """
    if fast is None:
        # Asked once: looking installed versions up reads files, and this would be done for every connection.
        unsupported = fastpath.unsupported()
        if unsupported is not None:
            effect = "several times the CPU per token; GOAWAY cuts streams"
            log.warning("slow_transport", reason=unsupported, effect=effect)
        fast = unsupported is None
    if not bootstrap and not settings.tls.enabled and not settings.grpc_endpoint.stays_here:
        log.warning("plaintext_connection", peer=peer, endpoint=settings.grpc_endpoint.label, advice="--grpc-tls")
    pool = Pool(settings, peer=peer, bootstrap=bootstrap, fast=fast)
    try:
        await pool.connect_all()
        failure: BaseException | None = None
        async with trio.open_nursery() as upkeep:
            for slot in pool.slots:
                upkeep.start_soon(pool.keep, slot)
            upkeep.start_soon(pool.keep_alive)
            try:
                yield pool
            except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, so not in a group
                failure = error
            finally:
                upkeep.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        await pool.aclose()
