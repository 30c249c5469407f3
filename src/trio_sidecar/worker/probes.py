"""Answers to an orchestrator's probes, where Dynamo's system server does not give them.

A worker may wait for its engine for half an hour, and Dynamo's runtime, which has that server, starts only then. A
liveness probe that gets no answer meanwhile would restart the worker again and again, so ``/live``, ``/health`` and
``/metrics`` are answered on the server's port with 200 from the first moment (R11.10, R15.17). When the runtime starts,
it takes the port over.

Dynamo's server does not know whether the engine is there, and gives ``/live`` and ``/health`` the same status. Whoever
wants to know has a port of ours, from the worker's first moment to its last.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from trio_sidecar.errors import InvalidConfig
from trio_sidecar.metrics import TEXT_FORMAT
from trio_sidecar.observe.pages import NOT_FOUND, Page, serve_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from trio_sidecar.worker.metrics import WorkerMetrics

__all__ = ["open_pages", "open_probes", "system_port"]

PORT = "DYN_SYSTEM_PORT"
HOST = "DYN_SYSTEM_HOST"
DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - Dynamo's own default
PAGES_PORT = "--metrics-port"
MAX_PORT = 65535

log = structlog.get_logger("trio_sidecar.worker")


def system_port(environment: Mapping[str, str]) -> int | None:
    """The port of Dynamo's system server; None if there is none, which is so unless the variable is set.

    Raises:
        InvalidConfig: The variable holds no port.
    """
    text = environment.get(PORT, "").strip()
    if not text:
        return None
    try:
        port = int(text)
    except ValueError:
        port = MAX_PORT + 1
    if port > MAX_PORT:
        reason = f"must be a port from 0 to {MAX_PORT}, or negative for no system server, not {text!r}"
        raise InvalidConfig(PORT, reason)
    return port if port >= 0 else None


@asynccontextmanager
async def open_probes(environment: Mapping[str, str], metrics: WorkerMetrics) -> AsyncIterator[None]:
    """Answer probes for the length of the block, where Dynamo's system server will be.

    Port 0 is left to Dynamo: a port that the system chose for us would not be the one that it gets.

    Raises:
        InvalidConfig: The address cannot be listened on.
    """
    page = partial(_page, metrics, 200)
    async with _serving(PORT, system_port(environment) or None, environment, page):
        yield


@asynccontextmanager
async def open_pages(port: int | None, environment: Mapping[str, str], metrics: WorkerMetrics) -> AsyncIterator[None]:
    """Tell the truth for the length of the block, if there is a port: ``/health`` is 200 only while the worker serves.

    On the address of Dynamo's system server; port 0 lets the system choose, and a line in the log says which.

    Raises:
        InvalidConfig: The address cannot be listened on.
    """
    async with _serving(PAGES_PORT, port, environment, partial(_page, metrics, 503)):
        yield


@asynccontextmanager
async def _serving(
    source: str, port: int | None, environment: Mapping[str, str], page: Callable[[str], Awaitable[Page]]
) -> AsyncIterator[None]:
    if port is None:
        yield
        return
    host = environment.get(HOST) or DEFAULT_HOST
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise InvalidConfig(source, reason) from error
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_pages, listeners, page)
        log.debug("pages_listening", source=source, host=host, port=listeners[0].socket.getsockname()[1])
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, so not in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _page(metrics: WorkerMetrics, unhealthy: int, path: str) -> Page:  # noqa: ASYNC124 - serve_pages awaits it
    match path:
        case "/live":
            return Page(200, "alive\n")
        case "/health":
            return Page(200 if metrics.state == "serving" else unhealthy, f"{metrics.state}\n")
        case "/metrics":
            return Page(200, metrics.text(), TEXT_FORMAT)
        case _:
            return NOT_FOUND
