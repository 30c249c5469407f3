"""A server's pages for orchestrators and scrapers: ``/live``, ``/health`` and ``/metrics``."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

import trio_sidecar
from trio_sidecar.bridge import run_aio
from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.errors import InvalidConfig, SidecarError
from trio_sidecar.metrics import (
    ENGINE_FAMILIES,
    TEXT_FORMAT,
    FamilyCollector,
    Histogram,
    exposition,
    passed_on,
    watch_lag,
)
from trio_sidecar.metrics.families import LATENCY_BOUNDS
from trio_sidecar.observe.pages import NOT_FOUND, Page, serve_pages
from trio_sidecar.wire import HealthCheckResponseServingStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_sidecar.config import ServerSettings
    from trio_sidecar.metrics.exposition import Reading
    from trio_sidecar.server.server import GrpcServer

__all__ = ["ServerPages", "open_pages"]

PORT_FLAG = "--metrics-port"
LOOPBACK = "127.0.0.1"
"""Where the pages are if the server listens on a file."""

ENGINE_PREFIX = "vllm:"
"""The metrics of a vLLM in this process."""

log = structlog.get_logger("trio_sidecar.server")


@attrs.define(eq=False)
class ServerPages:
    """The pages of one process.

    Attributes:
        server: The server, once there is one.
        lag: How late the loop was.
    """

    server: GrpcServer | None = None
    lag: Histogram = attrs.field(factory=lambda: Histogram(LATENCY_BOUNDS))

    async def page(self, path: str) -> Page:
        """The page for a path."""
        match path:
            case "/live":
                return Page(200, "alive\n")
            case "/health":
                return await self._health()
            case "/metrics":
                collector = FamilyCollector(ENGINE_FAMILIES, self.read)
                return Page(200, exposition(collector, passed_on(ENGINE_PREFIX)), TEXT_FORMAT)
            case _:
                return NOT_FOUND

    async def _health(self) -> Page:
        """Whether the whole server serves, as its gRPC health service would say."""
        if self.server is None:
            return Page(503, "starting\n")
        try:
            status = await run_aio(self.server.health.aio_status, "")
        except SidecarError:
            return Page(503, "the engine cannot be asked\n")
        serving = status == HealthCheckResponseServingStatus.SERVING
        return Page(200, "serving\n") if serving else Page(503, "not serving\n")

    def read(self) -> Reading:
        """The values of all families now."""
        common: Reading = {"build_info": {(trio_sidecar.__version__,): 1}, "loop_lag_seconds": self.lag}
        if self.server is None:
            return common
        meter, now = self.server.meter, self.server.statistics()
        return {
            **common,
            "server_connections": now.connections,
            "server_calls_in_flight": now.calls,
            "server_calls": meter.ended.copy(),
            "server_call_duration_seconds": {(method,): histogram for method, histogram in meter.duration.items()},
            "server_output_tokens": meter.output_tokens,
            "server_draining": int(self.server.health.withdrawn),
        }


@asynccontextmanager
async def open_pages(settings: ServerSettings) -> AsyncIterator[ServerPages]:
    """Serve the pages for the length of the block, if there is a port for them (Trio-flavoured).

    They are on the host on which the server listens, or on the loopback address where that is a file.

    Raises:
        InvalidConfig: The port cannot be listened on.
    """
    pages = ServerPages()
    if settings.metrics_port is None:
        yield pages
        return
    host = settings.listen.host if isinstance(settings.listen, ListenAddress) else LOOPBACK
    try:
        listeners = await trio.open_tcp_listeners(settings.metrics_port, host=host)
    except OSError as error:
        reason = f"cannot listen on {host}:{settings.metrics_port}: {error.strerror or error}"
        raise InvalidConfig(PORT_FLAG, reason) from error
    log.info("pages_listening", host=host, port=listeners[0].socket.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_pages, listeners, pages.page)
        nursery.start_soon(watch_lag, pages.lag)
        try:
            yield pages
        finally:
            nursery.cancel_scope.cancel()
