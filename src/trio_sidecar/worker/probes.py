"""Answers to an orchestrator's probes while Dynamo's runtime, and with it its own system server, is not there yet.

A worker may wait for its engine for half an hour. A liveness probe that gets no answer meanwhile would restart it again
and again, so ``/live``, ``/health`` and ``/metrics`` are answered with 200 from the first moment (R11.10, R15.17). When
the runtime starts, it takes the port over.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog
import trio

from trio_sidecar.errors import InvalidConfig
from trio_sidecar.observe.pages import NOT_FOUND, Page, serve_pages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["open_probes", "system_port"]

PORT = "DYN_SYSTEM_PORT"
HOST = "DYN_SYSTEM_HOST"
DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - Dynamo's own default
PATHS = ("/live", "/health", "/metrics")
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
async def open_probes(environment: Mapping[str, str]) -> AsyncIterator[None]:
    """Answer probes for the length of the block, where Dynamo's system server will be.

    Port 0 is left to Dynamo: a port that the system chose for us would not be the one that it gets.

    Raises:
        InvalidConfig: The address cannot be listened on.
    """
    port = system_port(environment)
    if not port:
        yield
        return
    host = environment.get(HOST) or DEFAULT_HOST
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise InvalidConfig(PORT, reason) from error
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_pages, listeners, _page)
        log.debug("probes_listening", host=host, port=port)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, so not in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _page(path: str) -> Page:
    return Page() if path in PATHS else NOT_FOUND
