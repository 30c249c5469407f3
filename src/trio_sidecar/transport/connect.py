"""The start-up policy of a pool: which slot connects when, how long, and what an operator reads if it fails (spec 3).

Pure Trio over an injected attempt, so that all of it runs in virtual time. Slot 1 is connected alone, because a peer
that is not there should be asked once, not n times; the other slots follow side by side. One absolute deadline caps
every attempt and every sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import structlog
import trio

from trio_sidecar.deadline import Deadline, format_seconds
from trio_sidecar.errors import ConnectError, ErrorKind, SidecarError, cause_chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_sidecar.config import TransportSettings

__all__ = ["FailureLog", "StartupError", "connect_slots"]

T = TypeVar("T")

LOG_INTERVAL_SECS = 30.0
"""A failure with an unchanged text is logged again after this time (R3.10)."""

PROGRESS_INTERVAL_SECS = 10.0
"""How often an operator is told what the start-up waits for (FR-033)."""

log = structlog.get_logger("trio_sidecar.transport.connect")


class StartupError(ConnectError):
    """A slot could not be connected before the start-up deadline (R3.6).

    Attributes:
        peer: Whom we wanted to reach, for example ``vLLM``.
        endpoint: Where it should be.
        slot: The pool slot that failed, from 1.
        deadline_secs: The configured deadline.
        attempts: How many attempts were begun.
        elapsed_secs: How long the pool has tried.
        cause: The last failure with its causes (R3.7).
    """

    def __init__(
        self,
        *,
        peer: str,
        endpoint: str,
        slot: int,
        deadline_secs: float,
        attempts: int,
        elapsed_secs: float,
        cause: str,
    ) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.slot = slot
        self.deadline_secs = deadline_secs
        self.attempts = attempts
        self.elapsed_secs = elapsed_secs
        self.cause = cause
        super().__init__(
            f"cannot connect to {peer} at {endpoint}: pool slot {slot} failed within {format_seconds(deadline_secs)} "
            f"after {attempts} attempts ({format_seconds(elapsed_secs)} elapsed): {cause}"
        )


@attrs.define
class FailureLog:
    """Decides which repeated failures are worth a log line (R3.10); pure.

    Attributes:
        interval_secs: An unchanged text is due again after this time.
    """

    interval_secs: float = LOG_INTERVAL_SECS
    _text: str | None = None
    _at: float = 0.0
    _suppressed: int = 0

    def admit(self, text: str, now: float) -> int | None:
        """How many failures were held back since the last line if this one is due, else None."""
        if text == self._text and now - self._at < self.interval_secs:
            self._suppressed += 1
            return None
        suppressed, self._suppressed = self._suppressed, 0
        self._text, self._at = text, now
        return suppressed


@attrs.define(kw_only=True, eq=False)
class _Startup(Generic[T]):
    """One start-up of a pool."""

    peer: str
    endpoint: str
    settings: TransportSettings
    bootstrap: bool
    attempt: Callable[[int, float], Awaitable[T]]
    deadline: Deadline
    started_at: float
    results: dict[int, T] = attrs.field(factory=dict)
    error: SidecarError | None = None

    async def run(self) -> list[T]:
        await self.connect(1)
        async with trio.open_nursery() as start_up:
            for slot in range(2, self.settings.grpc_connections + 1):
                start_up.start_soon(self.connect_or_fail_all, slot, start_up.cancel_scope)
        if self.error is not None:
            raise self.error
        return [self.results[slot] for slot in range(1, self.settings.grpc_connections + 1)]

    async def connect_or_fail_all(self, slot: int, all_slots: trio.CancelScope) -> None:
        """Connect one of the later slots; the first that fails ends the others, and its error is the pool's (R3.8)."""
        try:
            await self.connect(slot)
        except SidecarError as error:
            # Two slots may reach the deadline in the same moment.
            self.error = self.error or error
            all_slots.cancel()

    async def connect(self, slot: int) -> None:
        """Try until the slot is connected or the deadline has passed."""
        attempts = 0
        failure: Exception | None = None
        failures = FailureLog()
        progress = FailureLog(PROGRESS_INTERVAL_SECS)
        with self.deadline.scope():
            while not self.deadline.expired():
                attempts += 1
                timeout = self.deadline.sooner_of(self.settings.grpc_connect_attempt_timeout_secs)
                try:
                    self.results[slot] = await self._attempt(slot, timeout)
                except (OSError, SidecarError) as error:
                    if isinstance(error, SidecarError) and error.kind is ErrorKind.INVALID_ARGUMENT:
                        raise  # no retry makes a wrong setting right
                    failure = error
                    self._log(slot, attempts, error, failures, progress)
                    await trio.sleep(self.deadline.sooner_of(self.settings.grpc_retry_interval_secs))
                else:
                    return
        raise StartupError(
            peer=self.peer,
            endpoint=self.endpoint,
            slot=slot,
            deadline_secs=self.settings.grpc_startup_deadline_secs,
            attempts=attempts,
            elapsed_secs=trio.current_time() - self.started_at,
            cause="the attempt exceeded the startup deadline" if failure is None else cause_chain(failure),
        ) from failure

    async def _attempt(self, slot: int, timeout: float) -> T:  # noqa: ASYNC109 - the attempt is given its share (R3.3)
        """One attempt; one that overstays its time is ended and has failed."""
        with trio.move_on_after(timeout):
            return await self.attempt(slot, timeout)
        reason = f"no connection within {format_seconds(timeout)}"
        raise ConnectError(reason)

    def _log(self, slot: int, attempt: int, error: Exception, failures: FailureLog, progress: FailureLog) -> None:
        now = trio.current_time()
        text = cause_chain(error)
        fields = {
            "peer": self.peer,
            "endpoint": self.endpoint,
            "slot": slot,
            "attempt": attempt,
            "elapsed_secs": round(now - self.started_at, 3),
            "remaining_secs": round(self.deadline.remaining(), 3),
            "retry_interval_secs": self.settings.grpc_retry_interval_secs,
            "bootstrap": self.bootstrap,
            "error": text,
        }
        if (suppressed := failures.admit(text, now)) is not None:
            log.debug("connect_attempt_failed", suppressed=suppressed, **fields)
        if progress.admit("", now) is not None:
            log.info("waiting_for_peer", **fields)


async def connect_slots(
    *,
    peer: str,
    endpoint: str,
    settings: TransportSettings,
    bootstrap: bool,
    attempt: Callable[[int, float], Awaitable[T]],
) -> list[T]:
    """Connect every slot of a pool (R3.1 to R3.11).

    Args:
        peer: Name of the peer, for messages.
        endpoint: Where it is, for messages.
        settings: Number of slots, attempt timeout, retry interval and deadline; ones that the clock cannot represent
            do not exist (R3.9).
        bootstrap: Whether this runs before the worker's own start; only a field of log lines (R3.11).
        attempt: Makes one connection: ``attempt(slot, timeout)`` with slots from 1 and the timeout in seconds. Its
            OSErrors and SidecarErrors are failures to retry; any other exception is a fault in the program and ends it.

    Returns:
        What the attempts returned, in slot order.

    Raises:
        StartupError: A slot was not connected before the deadline; the first one that failed (R3.8). What other slots
            had connected by then is the attempt's to close.
    """
    return await _Startup(
        peer=peer,
        endpoint=endpoint,
        settings=settings,
        bootstrap=bootstrap,
        attempt=attempt,
        deadline=Deadline.after(settings.grpc_startup_deadline_secs),
        started_at=trio.current_time(),
    ).run()
