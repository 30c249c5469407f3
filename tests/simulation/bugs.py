"""Known bugs, to be planted: the simulation has to find each of them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trio_sidecar.bridge import AioCancelled
from trio_sidecar.deadline import Deadline
from trio_sidecar.lora.locks import AdapterLock
from trio_sidecar.requests.buffer import OutputBuffer
from trio_sidecar.requests.session import Session
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.transport import client
from trio_sidecar.transport.connection import ConnectionState
from trio_sidecar.transport.fastconnection import FastConnection
from trio_sidecar.transport.faststream import FastStream
from trio_sidecar.transport.pool import Pool
from trio_sidecar.worker.management import Management

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["BUGS"]


def lease_not_released_on_cancel() -> None:
    """A cancelled call keeps its place on the connection."""
    leave: Any = client._Call.__aexit__

    async def aexit(self: Any, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and issubclass(kind, AioCancelled):
            self._pool = _NoRelease()
        await leave(self, kind, error, trace)

    client._Call.__aexit__ = aexit  # type: ignore[method-assign, assignment]


class _NoRelease:
    def release(self, lease: object) -> None:
        """Forget to."""


def waiters_not_failed_on_loss() -> None:
    """Calls that wait for a connection go on waiting when there is none to come."""

    def hopeless(self: Any) -> None:
        del self

    Pool._hopeless = hopeless  # type: ignore[method-assign]


def end_delivered_twice() -> None:
    """The buffer hands the terminal out again."""
    take: Any = OutputBuffer.aio_take
    given: list[tuple[OutputBuffer, Any]] = []

    async def aio_take(self: OutputBuffer) -> Any:
        again = next((each for each in given if each[0] is self), None)
        if again is not None:
            given.remove(again)
            return again[1]
        chunk = await take(self)
        if chunk is not None and "finish_reason" in chunk:
            given.append((self, chunk))
        return chunk

    OutputBuffer.aio_take = aio_take  # type: ignore[method-assign]


def drain_deadline_ignored() -> None:
    """A worker that ends waits for its requests without limit."""
    drain: Any = Sessions.drain

    async def drain_forever(self: Sessions, deadline: Deadline) -> Any:
        del deadline
        return await drain(self, Deadline(math.inf))

    Sessions.drain = drain_forever  # type: ignore[method-assign]


def terminal_swallowed_after_goaway() -> None:
    """The last message of a stream is lost if its connection drains."""
    trailers: Any = FastStream.on_trailers

    def on_trailers(self: FastStream, headers: Any) -> None:
        if self._connection.state is ConnectionState.DRAINING and self._splitter.messages:
            self._splitter.messages.pop()
        trailers(self, headers)

    FastStream.on_trailers = on_trailers  # type: ignore[method-assign]


def usage_counts_what_was_converted() -> None:
    """The terminal of a cancelled request counts tokens that nobody got."""

    def cancelled_chunk(self: Session) -> Any:
        return self._responder.cancelled()

    Session._cancelled_chunk = cancelled_chunk  # type: ignore[method-assign]


def stream_not_reset() -> None:
    """A call that is left early is forgotten here and not told to the engine."""

    def leave(self: FastConnection, stream: FastStream) -> None:
        self.streams.pop(stream.id, None)
        self.senders.discard(stream)

    FastConnection.leave = leave  # type: ignore[method-assign]


def cancel_lost_before_the_first_token() -> None:
    """A cancel that comes before anything was delivered is forgotten."""
    cancel: Any = Session.cancel

    def late_cancel(self: Session) -> None:
        if self._buffer.delivered_tokens:
            cancel(self)

    Session.cancel = late_cancel  # type: ignore[method-assign]


def adapter_lock_kept_on_cancel() -> None:
    """A request that is cancelled before the engine has accepted it keeps its adapter's lock."""
    reading: Any = AdapterLock.aio_reading
    never_left: list[Any] = []

    @asynccontextmanager
    async def aio_reading(self: AdapterLock) -> AsyncIterator[None]:
        kept = reading(self)
        await kept.__aenter__()
        try:
            yield
        except AioCancelled:
            never_left.append(kept)  # or it would be closed as garbage
            raise
        except Exception:
            await kept.__aexit__(None, None, None)  # noqa: ASYNC120 - asyncio-flavoured
            raise
        await kept.__aexit__(None, None, None)

    AdapterLock.aio_reading = aio_reading  # type: ignore[method-assign]


def requests_refused_after_recovery() -> None:
    """A worker whose engine has come back goes on refusing."""

    def resume(self: Sessions) -> None:
        del self

    Sessions.resume = resume  # type: ignore[method-assign]


def blocks_of_a_replaced_engine_kept() -> None:
    """After a recovery, routers still hear the engine before, and its blocks."""
    back: Any = Management.aio_return_from_recovery

    async def aio_back(self: Management, now: Any, *, replaced: bool) -> None:
        del replaced
        await back(self, now, replaced=False)

    Management.aio_return_from_recovery = aio_back  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        lease_not_released_on_cancel,
        waiters_not_failed_on_loss,
        end_delivered_twice,
        drain_deadline_ignored,
        terminal_swallowed_after_goaway,
        usage_counts_what_was_converted,
        stream_not_reset,
        cancel_lost_before_the_first_token,
        adapter_lock_kept_on_cancel,
        requests_refused_after_recovery,
        blocks_of_a_replaced_engine_kept,
    )
}
"""By name; each changes the running process for good."""
