"""Waiting until an engine's services report SERVING (spec 5); Trio-flavoured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.deadline import format_seconds
from trio_sidecar.errors import (
    ConnectError,
    ConnectionTimeoutError,
    IncompatibleEngine,
    RpcError,
    StatusCode,
    cause_chain,
)
from trio_sidecar.transport.connect import PROGRESS_INTERVAL_SECS, FailureLog
from trio_sidecar.wire import HealthCheckResponseServingStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_sidecar.deadline import Deadline
    from trio_sidecar.engines.contract import Engine

__all__ = ["wait_until_serving"]

log = structlog.get_logger("trio_sidecar.health_wait")


async def wait_until_serving(
    engine: Engine,
    services: Iterable[str],
    deadline: Deadline,
    retry_interval_secs: float,
    *,
    peer: str = "vLLM",
) -> None:
    """Wait until each service reports SERVING, one after another in the given order (R5.1 to R5.6).

    Args:
        engine: Whom to ask.
        services: For example ``vllm.Control``.
        deadline: For all of them together; bounds every check and every pause.
        retry_interval_secs: Pause between checks.
        peer: Name of the engine, for messages.

    Raises:
        IncompatibleEngine: The engine has no health API, or does not know the service; no retry makes that right.
        ConnectError: The deadline passed; names service, time and last status.
    """
    started_at = trio.current_time()
    for service in services:
        await _ServiceWait(engine, service, deadline, retry_interval_secs, peer, started_at).run()


@attrs.define
class _ServiceWait:
    """The wait for one service."""

    engine: Engine
    service: str
    deadline: Deadline
    retry_interval_secs: float
    peer: str
    started_at: float
    last_status: str = "none reported"
    progress: FailureLog = attrs.field(factory=lambda: FailureLog(PROGRESS_INTERVAL_SECS))

    async def run(self) -> None:
        with self.deadline.scope():
            while not self.deadline.expired():
                if await self.is_serving():
                    return
                self.report()
                await trio.sleep(self.deadline.sooner_of(self.retry_interval_secs))
        elapsed = format_seconds(trio.current_time() - self.started_at)
        reason = (
            f"{self.peer} service {self.service} did not become SERVING within {elapsed}; "
            f"last status: {self.last_status}"
        )
        raise ConnectError(reason)

    async def is_serving(self) -> bool:
        try:
            status = await run_aio(self.engine.aio_check_health, self.service)
        except RpcError as error:
            if error.status in (StatusCode.NOT_FOUND, StatusCode.UNIMPLEMENTED):
                reason = f"{self.peer} does not report {self.service} through the gRPC health API: {error}"
                raise IncompatibleEngine(reason) from error
            self.last_status = str(error)
            return False
        except (ConnectError, ConnectionTimeoutError) as error:
            self.last_status = cause_chain(error)
            return False
        self.last_status = _status_name(status)
        return status == HealthCheckResponseServingStatus.SERVING

    def report(self) -> None:
        now = trio.current_time()
        if self.progress.admit(self.last_status, now) is not None:
            log.info(
                "waiting_for_engine",
                peer=self.peer,
                service=self.service,
                last_status=self.last_status,
                elapsed_secs=round(now - self.started_at, 3),
                remaining_secs=round(self.deadline.remaining(), 3),
            )


def _status_name(status: int) -> str:
    try:
        return HealthCheckResponseServingStatus(status).name or str(int(status))
    except ValueError:
        return str(int(status))
