"""All connections and calls of one server (asyncio-flavoured callbacks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import structlog
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from trio_sidecar.bridge import AioEvent, aio_now
from trio_sidecar.bridge.listen import aio_spawn
from trio_sidecar.errors import StatusCode
from trio_sidecar.metrics import CallMeter
from trio_sidecar.server.call import ServerCall
from trio_sidecar.server.flood import ResetBudget
from trio_sidecar.server.headers import BadHeaders, parse_headers, rejection
from trio_sidecar.server.health import HealthFace
from trio_sidecar.server.methods import method_table
from trio_sidecar.server.protocol import ConnectionHandler, ServerProtocol
from trio_sidecar.tracing import NO_TRACES
from trio_sidecar.wire.methods import CONTROL, HEALTH, INFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from grpclib.protocol import Stream

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.server.methods import Handler
    from trio_sidecar.tracing import Tracer

__all__ = ["GrpcServer", "ServerStatistics"]

SHUTTING_DOWN = "the server is shutting down"

log = structlog.get_logger("trio_sidecar.server")


@attrs.frozen(slots=True, kw_only=True)
class ServerStatistics:
    """A snapshot.

    Attributes:
        connections: Open ones.
        calls: Open ones, health watches included.
    """

    connections: int
    calls: int


class GrpcServer:
    """The vLLM face over one engine; :func:`trio_sidecar.server.serve` runs it.

    Attributes:
        health: The health service.
        meter: What is counted of calls.
    """

    def __init__(self, engine: Engine, *, max_message_bytes: int, tracer: Tracer = NO_TRACES) -> None:
        self.health = HealthFace(engine)
        self.meter = CallMeter()
        self._methods = method_table(engine, self.health, tracer, self.meter)
        self._max_message_bytes = max_message_bytes
        self._connections: set[ServerProtocol] = set()
        self._calls: set[ServerCall] = set()
        self._changed = AioEvent()
        self._refusing = False

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(connections=len(self._connections), calls=len(self._calls))

    def protocol(self) -> ServerProtocol:
        """A new connection's protocol."""
        return ServerProtocol(_Handler(self))

    def refuse(self) -> None:
        """Answer new calls with UNAVAILABLE from now on; those that run go on."""
        self._refusing = True

    def end_calls(self) -> int:
        """End every call with UNAVAILABLE; returns how many a drain had waited for in vain."""
        calls = tuple(self._calls)
        for call in calls:
            call.end(StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        return sum(call.draining for call in calls)

    def close_connections(self) -> None:
        """Close every connection when what was written is sent."""
        for connection in tuple(self._connections):
            connection.close()

    def abort_connections(self) -> None:
        """Close every connection now."""
        for connection in tuple(self._connections):
            connection.abort()

    async def aio_wait_drained(self) -> None:
        """Wait until no call is open but health watches."""
        await self._aio_wait(lambda: not any(call.draining for call in self._calls))

    async def aio_wait_calls_ended(self) -> None:
        """Wait until no call is open at all."""
        await self._aio_wait(lambda: not self._calls)

    async def aio_wait_disconnected(self) -> None:
        """Wait until no connection is open."""
        await self._aio_wait(lambda: not self._connections)

    async def _aio_wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.aio_wait()

    def add_connection(self, protocol: ServerProtocol) -> None:
        """A connection is up."""
        self._connections.add(protocol)

    def remove_connection(self, protocol: ServerProtocol) -> None:
        """A connection is gone."""
        self._connections.discard(protocol)
        self._changed.set()

    def open_call(
        self,
        protocol: ServerProtocol,
        stream: Stream,
        raw_headers: Iterable[tuple[bytes | str, bytes | str]],
        release: Callable[[], None],
    ) -> ServerCall | None:
        """Start a call's task; None if it was answered already."""
        headers = parse_headers(raw_headers)
        if isinstance(headers, BadHeaders):
            self._reject(protocol, stream, headers, release)
            return None
        handler = self._methods.get(headers.path)
        if handler is None:
            self._reject(protocol, stream, _unknown(headers.path), release)
            return None
        if self._refusing:
            self._reject(protocol, stream, BadHeaders(200, StatusCode.UNAVAILABLE, SHUTTING_DOWN), release)
            return None
        call = ServerCall(protocol, stream, headers, self._max_message_bytes)
        self._calls.add(call)
        call.attach(aio_spawn(self._aio_run, call, handler, release, name=headers.path))
        return call

    async def _aio_run(self, call: ServerCall, handler: Handler, release: Callable[[], None]) -> None:
        try:
            await call.aio_run(handler)
        finally:
            self._calls.discard(call)
            self.meter.note_end(call.path.rpartition("/")[2], call.status.name, call.seconds)
            self._changed.set()
            release()

    def _reject(self, protocol: ServerProtocol, stream: Stream, bad: BadHeaders, release: Callable[[], None]) -> None:
        log.debug("call_rejected", status=bad.status.name, reason=bad.reason)
        try:
            protocol.h2.send_headers(stream.id or 0, rejection(bad), end_stream=True)
            if stream.closable:
                stream.reset_nowait()
        except ProtocolError as error:
            log.debug("call_reject_unheard", reason=str(error))
        release()
        protocol.connection.flush()


class _Handler(ConnectionHandler):
    """One connection's calls."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._protocol: ServerProtocol | None = None
        self._calls: dict[Stream, ServerCall] = {}
        self._resets = ResetBudget()

    def connected(self, protocol: ServerProtocol) -> None:
        self._protocol = protocol
        self._server.add_connection(protocol)

    def disconnected(self, protocol: ServerProtocol) -> None:
        self.close()
        self._server.remove_connection(protocol)
        self._protocol = None

    def accept(
        self,
        stream: Stream,
        headers: Iterable[tuple[bytes | str, bytes | str]],
        release_stream: Callable[[], None],
    ) -> None:
        if self._protocol is None:
            return

        def release() -> None:
            self._calls.pop(stream, None)
            release_stream()

        call = self._server.open_call(self._protocol, stream, headers, release)
        if call is not None:
            self._calls[stream] = call

    def cancel(self, stream: Stream) -> None:
        if (call := self._calls.get(stream)) is not None:
            unanswered = not call.answered
            call.gone()
            if unanswered and self._protocol is not None and not self._resets.spend(aio_now()):
                log.warning("client_resets_too_many_calls", advice="it is told ENHANCE_YOUR_CALM and disconnected")
                self._protocol.close(ErrorCodes.ENHANCE_YOUR_CALM)

    def close(self) -> None:
        for call in tuple(self._calls.values()):
            call.gone()


def _unknown(path: str) -> BadHeaders:
    service, _, method = path.removeprefix("/").rpartition("/")
    known = (INFERENCE, CONTROL, HEALTH)
    if service in known:
        return BadHeaders(200, StatusCode.UNIMPLEMENTED, f"unknown method {method[:64]!r} of {service}")
    reason = f"unknown service {service[:64]!r}; known are {', '.join(known)}"
    return BadHeaders(200, StatusCode.UNIMPLEMENTED, reason)
