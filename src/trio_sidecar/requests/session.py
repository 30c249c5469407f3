"""One request's life, from an accepted request to its one terminal or its one error.

Three parties share a session. The *face* opens it and takes chunks from it, in asyncio. The *pump*, one asyncio
coroutine, owns the engine's stream from open to close and fills the buffer. The *life* is a Trio task in the handler
ring whose cancel scope encloses the pump: it ends the pump when the request is cancelled, when its consumer goes or
when the ring does. Trio is woken twice per request, at its start and at its end, and never for a token.

How a session ends, for its consumer (spec 10, 11):

- the engine's terminal, or one error after the chunks that arrived before it;
- a request cancel: what waits in the buffer is dropped, and one cancelled terminal counts exactly the delivered tokens;
- the consumer goes: nothing more, and the engine's stream is released;
- the engine is silent for too long: a ConnectionTimeoutError after the waiting chunks;
- the drain's deadline or a dying ring: an EngineShutdown error after the waiting chunks, never a silent normal end.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import structlog
import trio

from trio_sidecar.bridge import run_aio_limited
from trio_sidecar.errors import ConnectionTimeoutError, EngineShutdown, ProtocolError, RpcError, SidecarError
from trio_sidecar.metrics import RequestMeter, TokenClock
from trio_sidecar.requests.limits import SilenceLimits, SilenceWatch
from trio_sidecar.tracing import UNTRACED, Phase, with_trace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.requests.buffer import BufferStatistics, OutputBuffer
    from trio_sidecar.requests.contract import CancelPolicy, Converted, Responder
    from trio_sidecar.requests.limits import Hearing
    from trio_sidecar.tracing import RequestTrace

__all__ = ["EndReason", "Session"]

RPC = "GenerateStream"
"""The call that errors of a request name (R10.16)."""

RELEASE_SECONDS = 5.0
"""How long an engine may take to let go of a request, in seconds; then its cleanup is cancelled too."""

log = structlog.get_logger("trio_sidecar.requests")


class EndReason(enum.Enum):
    """Why a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    CONSUMER_GONE = "consumer_gone"
    ERROR = "error"
    SHUTDOWN = "shutdown"
    TIMEOUT = "timeout"


class Session:
    """One request; made by :meth:`trio_sidecar.requests.sessions.Sessions.open`.

    ``cancel`` and ``close`` are synchronous and may be called from either flavour, any number of times.

    Attributes:
        request_id: The caller's id, for logs.
        reason: Why it ended; None while it has not. Settled once ``life`` has ended.
    """

    __slots__ = (
        "_buffer",
        "_cancel_wanted",
        "_converted",
        "_failure",
        "_held_back",
        "_meter",
        "_policy",
        "_responder",
        "_scope",
        "_started_at",
        "_trace",
        "_watch",
        "reason",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        converted: Converted,
        responder: Responder,
        buffer: OutputBuffer,
        policy: CancelPolicy,
        *,
        silence: SilenceLimits | None = None,
        hearing: Hearing | None = None,
        trace: RequestTrace = UNTRACED,
        meter: RequestMeter | None = None,
    ) -> None:
        self.request_id = request_id
        self.reason: EndReason | None = None
        self._converted = converted
        self._responder = responder
        self._buffer = buffer
        self._policy = policy
        self._cancel_wanted = False
        self._held_back = False
        self._failure = ""
        self._trace = trace
        self._scope = trio.CancelScope()
        self._started_at = trio.current_time()
        self._meter = meter or RequestMeter()
        self._meter.accepted += 1
        self._meter.prompt_tokens += converted.response.prompt_tokens
        self._watch = SilenceWatch(silence or SilenceLimits(), self._expired, hearing)

    @property
    def waits_since(self) -> float | None:
        """When its present wait for the engine began, on the clock of ``aio_now``; None if it does not wait."""
        return self._watch.since

    # -- For the face -----------------------------------------------------------------------------------------------

    async def aio_next(self) -> Chunk | None:
        """Wait for the next chunk; the last one has a ``finish_reason`` (asyncio-flavoured, one caller at a time).

        Returns:
            None when the request has ended and everything was taken.

        Raises:
            SidecarError: The request failed; raised once, after the chunks that came before.
        """
        chunk = await self._buffer.aio_take()
        if chunk is not None:
            self._meter.chunks += 1
            self._meter.output_tokens += len(chunk["token_ids"])
        return chunk

    async def aio_chunks(self) -> AsyncIterator[Chunk]:
        """All chunks; leaving the iteration early, also by closing the generator, closes the session."""
        try:
            while (chunk := await self.aio_next()) is not None:
                yield chunk
        finally:
            self.close()

    def cancel(self) -> None:
        """The client cancelled: give the consumer one cancelled terminal and release the engine.

        That happens at once, or as soon as the policy allows. After the terminal was taken it has no effect.
        """
        if self._buffer.exhausted or self.reason is EndReason.CANCELLED:
            return
        self._cancel_wanted = True
        if self._policy.ready():
            self._cancel_now()
        else:
            self._held_back = True

    def close(self) -> None:
        """The consumer is gone: release the engine; no terminal."""
        if self._buffer.exhausted:
            return
        self.reason = EndReason.CONSUMER_GONE
        self._buffer.cut(None)
        self._scope.cancel()

    @property
    def age(self) -> float:
        """Seconds since it was accepted."""
        return trio.current_time() - self._started_at

    def statistics(self) -> BufferStatistics:
        """The buffer's."""
        return self._buffer.statistics()

    # -- For the sessions -------------------------------------------------------------------------------------------

    def shut_down(self, reason: str) -> None:
        """End the request with an EngineShutdown error, which lets the caller try another worker."""
        self._fail(EngineShutdown(reason), EndReason.SHUTDOWN)
        self._scope.cancel()

    def stop(self) -> None:
        """End the request with a cancelled terminal, whatever the policy: the worker stops (R10.12, R11.3, R11.4).

        One that was shut down keeps its error, because a client would take a terminal for a normal end.
        """
        if not self._buffer.exhausted and self.reason is not EndReason.SHUTDOWN:
            self._cancel_now()

    async def life(self, engine: Engine) -> None:
        """Run the request to its end, which the consumer has then reached (Trio-flavoured).

        Never raises on account of the request: one request's fault must not touch the others in the ring.
        """
        try:
            with self._scope:
                await run_aio_limited(RELEASE_SECONDS, self._aio_pump, engine)
        except Exception as error:  # noqa: BLE001 - the consumer gets it
            self._fail(self._explain(error), EndReason.ERROR)
        finally:
            if not self._buffer.ended:
                # Neither a cancel nor the engine ended it: the ring was cancelled from outside.
                self._fail(EngineShutdown("the worker is shutting down"), EndReason.SHUTDOWN)

    def log_end(self, role: str) -> None:
        """Write the request's one line."""
        log.debug(
            "request_ended",
            request_id=self.request_id,
            role=role,
            prompt_tokens=self._converted.response.prompt_tokens,
            output_tokens=self._buffer.delivered_tokens,
            seconds=round(self.age, 6),
            reason=(self.reason or EndReason.FINISHED).value,
        )

    def end_trace(self) -> None:
        """Say how it ended in its trace."""
        failed = self.reason in (EndReason.ERROR, EndReason.SHUTDOWN, EndReason.TIMEOUT)
        self._trace.end(
            (self.reason or EndReason.FINISHED).value,
            failure=self._failure if failed else "",
            prompt_tokens=self._converted.response.prompt_tokens,
            output_tokens=self._buffer.delivered_tokens,
        )

    # -- The pump ---------------------------------------------------------------------------------------------------

    async def _aio_pump(self, engine: Engine) -> None:
        try:
            await self._aio_read(engine)
        except Exception as error:
            if self._cancel_wanted and not self._buffer.ended:
                log.warning("engine_failed_after_cancel", request_id=self.request_id, exc_info=error)
                self._cancel_now()
            else:
                self._fail(self._explain(error), EndReason.ERROR)
        finally:
            self._watch.end()
            self._trace.released()
        # The request stays open, for the drain too, until its consumer has seen the end; the engine's stream is closed.
        await self._buffer.aio_wait_exhausted()

    async def _aio_read(self, engine: Engine) -> None:
        """Move answers from the engine to the buffer until the terminal; later messages are not read (R10.18)."""
        buffer, responder, policy, watch = self._buffer, self._responder, self._policy, self._watch
        trace = self._trace
        waiting = True
        clock = TokenClock(self._meter, self._started_at)
        watch.begin()
        trace.enter(Phase.STREAM_WAIT)
        metadata = with_trace(self._converted.metadata, trace.headers)
        async with engine.aio_generate(self._converted.wire, metadata) as stream:
            trace.enter(Phase.FIRST_TOKEN)
            while True:
                watch.asking()
                responses = await stream.aio_receive()
                watch.answered()
                if not responses:
                    reason = f"{RPC} ended before a terminal response with finish_info"
                    raise ProtocolError(reason)
                arrived_at = trio.current_time()
                for response in responses:
                    chunk = responder.convert(response)
                    policy.observe(response)
                    if waiting and chunk is not None:
                        waiting = False
                        trace.enter(Phase.STREAM)
                    if self._cancel_wanted and policy.ready():
                        self._cancel_now()
                        return
                    if chunk is not None and not buffer.put_nowait(chunk):
                        await buffer.aio_put(chunk)
                    if responder.finished:
                        buffer.close()
                        clock.arrived(arrived_at, responder.completion_tokens)
                        if responder.aborted_by_engine:
                            log.warning("engine_aborted_request", request_id=self.request_id)
                        return
                clock.arrived(arrived_at, responder.completion_tokens)

    # -- Ends -------------------------------------------------------------------------------------------------------

    def _cancel_now(self) -> None:
        self.reason = EndReason.CANCELLED
        self._buffer.cut(self._cancelled_chunk())
        self._scope.cancel()

    def _expired(self, reason: str) -> None:
        """The engine has been silent for too long; somebody whose cancel waits for it waits no longer."""
        if self._cancel_wanted and not self._buffer.ended:
            self._cancel_now()
            return
        self._fail(ConnectionTimeoutError(f"{RPC}: {reason}"), EndReason.TIMEOUT)
        self._scope.cancel()

    def _cancelled_chunk(self) -> Chunk:
        """The cancelled terminal; its usage counts what the consumer took, not what was converted (spec 10.1).

        Except for a cancel that had to wait for the first token: that one is counted, though nobody gets it (R10.8).
        """
        chunk = self._responder.cancelled()
        if self._held_back:
            return chunk
        usage = chunk["completion_usage"]
        usage["completion_tokens"] = min(usage["completion_tokens"], self._buffer.delivered_tokens)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return chunk

    def _fail(self, error: SidecarError, reason: EndReason) -> None:
        if self._buffer.ended:
            log.debug("request_failed_after_end", request_id=self.request_id, exc_info=error)
            return
        self.reason = reason
        self._failure = error.status.name
        self._buffer.fail(error)

    def _explain(self, error: Exception) -> SidecarError:
        """The error for the consumer: what engines and conversion raise on purpose as it is, anything else wrapped."""
        if isinstance(error, RpcError):
            return error.named(RPC)
        if isinstance(error, SidecarError):
            return error
        log.error("request_crashed", request_id=self.request_id, exc_info=error)
        wrapped = SidecarError(f"{RPC}: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
