"""A worker whose engine goes away takes itself out of service, and comes back when the engine does (spec 15).

One task watches the engine: both services' health, what it serves, and which lifetime of it that is. When the engine is
away, new requests are refused with an error that sends them to another worker, and the worker is withdrawn from
discovery; what runs goes on for as long as its stream lives. When the engine is back it has to be the one that the
worker was registered for, in a new lifetime perhaps; then the adapters' records are made to follow it, and requests are
taken again. Of an engine that was replaced, nothing that was known of its KV blocks is kept. None of that needs an
operator. An engine that serves something else ends the worker, with the reason (R15.7).

An engine that says that it serves, and does not answer, is away too: see :mod:`trio_sidecar.requests.hang`.

One failed look means nothing: a connection may just have been replaced. So a look that fails is repeated at once, and
only the second failure counts (FR-020). There is a look every two seconds, and at once after a connection was replaced:
an engine that is replaced within these two seconds is found out before it has answered much.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.deadline import Deadline
from trio_sidecar.discovery import DiscoveredModel, discover
from trio_sidecar.errors import (
    ConnectionTimeoutError,
    ErrorKind,
    IncompatibleEngine,
    RpcError,
    SidecarError,
    cause_chain,
)
from trio_sidecar.health_wait import wait_until_serving
from trio_sidecar.tracing import NO_TRACES, Activity
from trio_sidecar.wire import HealthCheckResponseServingStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.lifecycle import StopRequest
    from trio_sidecar.requests.hang import HangCheck
    from trio_sidecar.requests.sessions import Sessions
    from trio_sidecar.tracing import Tracer

__all__ = ["Availability", "Recovery", "RecoverySettings"]

SERVICES = ("vllm.Control", "vllm.Inference")

AWAY_AGAIN = (ErrorKind.CANNOT_CONNECT, ErrorKind.CONNECTION_TIMEOUT)
"""Kinds of failure by which an engine that has just come back shows that it has gone again (R15.4)."""

log = structlog.get_logger("trio_sidecar.recovery")


class Availability(Protocol):
    """Whether others can find the worker (asyncio-flavoured)."""

    @property
    def paused(self) -> bool:
        """Whether an operator has the engine rest: then it is no fault that it answers nothing."""
        ...

    async def aio_withdraw_for_recovery(self) -> None:
        """Let nobody find it, nor its adapters (R15.4); never raises."""
        ...

    async def aio_return_from_recovery(self, now: DiscoveredModel, *, replaced: bool) -> None:
        """Make what is published follow the engine, then let the worker be found again.

        Args:
            now: What the engine is.
            replaced: Whether it may be another lifetime, of whose KV blocks nothing is known (R15.6).

        Raises:
            SidecarError: That cannot be done, which ends the worker (R15.15) unless the engine has only gone again.
        """
        ...


@attrs.frozen(slots=True, kw_only=True)
class RecoverySettings:
    """Times, in seconds.

    Attributes:
        interval_secs: Between two looks at a healthy engine.
        look_secs: How long a look may take; one that takes longer has failed.
        confirm_secs: After a failed look, until the one that confirms it.
        retry_secs: Between two looks at an engine that is away.
        startup_secs: How long it may be away, before the worker gives up (R15.16).
    """

    interval_secs: float = 2.0
    look_secs: float = 10.0
    confirm_secs: float = 0.25
    retry_secs: float = 1.0
    startup_secs: float = 1800.0


@attrs.frozen(slots=True)
class _Fault:
    """What is wrong with the engine.

    Attributes:
        certain: Whether a second look would say the same.
    """

    reason: str
    certain: bool = False


@attrs.define(eq=False, kw_only=True)
class Recovery:
    """The watch over one engine.

    Attributes:
        engine: Whom to watch.
        model: What the worker was registered for.
        sessions: The requests.
        availability: How others find the worker.
        stop: Once a stop is requested, nothing is given back.
        tracer: Makes a span of each time that the engine is away.
        reconnected: Returns when a lost connection has been replaced: it may lead to another engine.
        hang: Finds out whether a healthy engine answers; None if nobody wants to know.
        recoveries: How often the engine has come back.
        away: Whether it is away now.
    """

    engine: Engine
    model: DiscoveredModel
    sessions: Sessions
    availability: Availability
    stop: StopRequest
    settings: RecoverySettings = attrs.field(factory=RecoverySettings)
    tracer: Tracer = NO_TRACES
    reconnected: Callable[[], Awaitable[None]] = trio.sleep_forever
    hang: HangCheck | None = None
    recoveries: int = attrs.field(default=0, init=False)
    away: bool = attrs.field(default=False, init=False)
    _instance: str = attrs.field(default="", init=False)
    _hung: bool = attrs.field(default=False, init=False)

    @property
    def instance_id(self) -> str:
        """Which lifetime of the engine is served."""
        return self._instance

    def follow(self, model: DiscoveredModel) -> None:
        """The lifetime of the engine with which serving begins."""
        self._instance = model.instance_id

    async def run(self) -> None:
        """Watch until cancelled (Trio-flavoured).

        Raises:
            IncompatibleEngine: The engine came back as another one.
            ConnectError: It did not come back in time.
            SidecarError: The adapters' records could not be made to follow it.
        """
        while True:
            reason = await self._until_away()
            with Activity(self.tracer, "recovery") as activity:
                recovered = await self._recover(reason)
                activity.results["recovered"] = recovered
            if not recovered:
                return  # whoever ends the worker has withdrawn it

    async def _recover(self, reason: str) -> bool:
        """Out of service, and back with the engine; False if a stop came before."""
        self.away = True
        self.sessions.suspend(f"the engine is away ({reason})")
        log.warning("engine_away", reason=reason, open_requests=self.sessions.statistics().open)
        await run_aio(self.availability.aio_withdraw_for_recovery)
        deadline = Deadline.after(self.settings.startup_secs)
        while True:
            now = await self._until_back(deadline)
            if self.stop.requested:
                return False
            if await self._return(now, deadline):
                break
        self.sessions.resume()
        self.away = False
        self.recoveries += 1
        log.info("engine_back", instance_id=self._instance, recoveries=self.recoveries)
        return True

    async def _return(self, now: DiscoveredModel, deadline: Deadline) -> bool:
        """Let the worker be found again; False if the engine went away meanwhile."""
        # An engine that does not say which lifetime it is in has to be taken for another one.
        replaced = not now.instance_id or now.instance_id != self._instance
        failure: SidecarError | None = None
        try:
            await run_aio(partial(self.availability.aio_return_from_recovery, now, replaced=replaced))
        except SidecarError as error:
            if error.kind not in AWAY_AGAIN:
                raise
            failure = error
        if failure is not None:
            log.info("engine_went_away_again", reason=str(failure))
            await trio.sleep(deadline.sooner_of(self.settings.retry_secs))
            if deadline.expired():
                raise failure
            return False
        if replaced:
            log.info("engine_replaced", was=self._instance, instance_id=now.instance_id)
        self._instance = now.instance_id
        return True

    async def _until_away(self) -> str:
        """Watch a healthy engine; why it no longer is one."""
        while True:
            with trio.move_on_after(self.settings.interval_secs):
                await self.reconnected()
            fault = await self._fault()
            if fault and fault.certain:
                return fault.reason
            if fault:
                await trio.sleep(self.settings.confirm_secs)
                if fault := await self._fault():
                    return fault.reason
            elif hang := await self._hang():
                return hang

    async def _hang(self) -> str:
        """Why a healthy engine must be taken to hang; empty if it need not."""
        if self.hang is None or self.availability.paused or not self.hang.suspects():
            return ""
        try:
            self._hung = not await self.hang.answers()
        except SidecarError as error:
            log.debug("engine_not_probed", reason=str(error))  # the next look finds out why
        return f"it says that it serves, and has answered nothing for {self.hang.silent_secs:g} s" if self._hung else ""

    async def _answers_again(self, deadline: Deadline) -> bool:
        """Whether an engine that was seen to hang, or the one after it, answers again."""
        if self.hang is None or not self._hung:
            return True
        with deadline.scope():
            self._hung = not await self.hang.answers()
        if self._hung and deadline.expired():
            reason = "the engine says that it serves, but has not answered a request of one token"
            raise ConnectionTimeoutError(reason)
        return not self._hung

    async def _fault(self) -> _Fault | None:
        """What is wrong with the engine."""
        with trio.move_on_after(self.settings.look_secs):
            try:
                for service in SERVICES:
                    status = await run_aio(self.engine.aio_check_health, service)
                    if status != HealthCheckResponseServingStatus.SERVING:
                        return _Fault(f"{service} is {HealthCheckResponseServingStatus(status).name or int(status)}")
                now = await discover(self.engine, Deadline.after(self.settings.look_secs))
                self.model.check_same_engine(now)
            except SidecarError as error:
                return _Fault(cause_chain(error))
            if now.instance_id == self._instance:
                return None
            return _Fault(f"another instance, {now.instance_id!r}, has taken over", certain=True)
        return _Fault(f"no answer within {self.settings.look_secs:g} s")

    async def _until_back(self, deadline: Deadline) -> DiscoveredModel:
        """Wait until the engine serves what it served, or something else, which is the end (R15.5 to R15.7)."""
        while True:
            try:
                await wait_until_serving(self.engine, SERVICES, deadline, self.settings.retry_secs)
                now = await discover(self.engine, deadline)
                self.model.check_same_engine(now)
                answers = await self._answers_again(deadline)
            except IncompatibleEngine:
                raise
            except SidecarError as error:
                if deadline.expired():
                    raise
                log.debug("engine_went_away_again", reason=str(error), rpc=isinstance(error, RpcError))
                await trio.sleep(deadline.sooner_of(self.settings.retry_secs))
                continue
            if answers:
                return now
