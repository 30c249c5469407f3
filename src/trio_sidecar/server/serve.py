"""A server's life: listen, serve, drain (Trio-flavoured)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.listen import aio_listen
from trio_sidecar.lifecycle import log_snapshots, open_stop_signals
from trio_sidecar.server.listen import bind, check_free
from trio_sidecar.server.pages import ServerPages, open_pages
from trio_sidecar.server.server import GrpcServer
from trio_sidecar.tls import server_context
from trio_sidecar.tracing import NO_TRACES, Activity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.bridge.listen import AioListeners
    from trio_sidecar.config import ServerSettings
    from trio_sidecar.endpoint import ListenAddress, UnixAddress
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.server.listen import Bound
    from trio_sidecar.tracing import Tracer

__all__ = ["run_server", "serve"]

END_CALLS_SECS = 2.0
"""How long calls that were ended may take to clean up, in seconds."""

CLOSE_SECS = 1.0
"""How long a peer may take to read the last bytes, in seconds."""

log = structlog.get_logger("trio_sidecar.server")


async def serve(
    engine: Engine,
    settings: ServerSettings,
    *,
    tracer: Tracer = NO_TRACES,
    snapshots: bool = False,
    pages: ServerPages | None = None,
    task_status: trio.TaskStatus[tuple[ListenAddress | UnixAddress, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an engine until cancelled, then drain.

    The drain: health says NOT_SERVING; calls are still taken for ``withdraw_grace_secs``; then new ones are refused as
    UNAVAILABLE, and those that run have ``drain_secs`` to end; the rest are ended as UNAVAILABLE, never in silence;
    then connections close. It happens in a shield, but takes no longer than these times and four seconds.

    Args:
        engine: Must stay open until this returns.
        settings: Where to listen, and the times.
        tracer: Makes the spans of generations and of the drain.
        snapshots: Log what the process holds at each SIGUSR1; only in the main thread.
        pages: Tell of this server from now on.
        task_status: ``started`` is given the bound addresses, one per address of the host.

    Raises:
        InvalidConfig: The address cannot be listened on, or a TLS file cannot be used.
    """
    server = GrpcServer(engine, max_message_bytes=settings.max_message_bytes, tracer=tracer)
    tls = server_context(settings.tls)
    bound = await bind(settings)
    try:
        listeners = await run_aio(aio_listen, server.protocol, bound.sockets, tls)
    except BaseException:
        bound.close()
        raise
    try:
        log.info(
            "server_listening",
            addresses=[str(address) for address in bound.addresses],
            tls=tls is not None,
            client_certificates=tls.verify_mode.name if tls is not None else None,
        )
        if pages is not None:
            pages.server = server
        task_status.started(bound.addresses)
        if snapshots:
            await log_snapshots(log, "server_snapshot", lambda: attrs.asdict(server.statistics()))
        await trio.sleep_forever()
    finally:
        limit = settings.withdraw_grace_secs + settings.drain_secs + END_CALLS_SECS + CLOSE_SECS
        with trio.move_on_after(limit + 1.0, shield=True):
            with Activity(tracer, "drain", requests=server.statistics().calls) as activity:
                activity.results["cut"] = await _drain(server, listeners, bound, settings)
        listeners.close()
        bound.remove_files()
        server.abort_connections()


async def run_server(
    engine: AbstractAsyncContextManager[Engine],
    settings: ServerSettings,
    on_listening: Callable[[str], None],
    *,
    tracer: Tracer = NO_TRACES,
) -> None:
    """Open an engine and serve it until SIGTERM or SIGINT, then drain; a main function for :func:`bridge.run`.

    A signal that comes while the engine is being opened ends that.

    Args:
        engine: Opened first, closed last.
        settings: Where to listen, and the times of the drain.
        on_listening: Called with each bound address, ``HOST:PORT`` or ``unix:///PATH``.
        tracer: Makes the spans.

    Raises:
        InvalidConfig: The address cannot be listened on; in an exception group.
    """
    await check_free(settings)
    async with open_stop_signals() as stop:
        with stop.cancelling() as opening:
            async with open_pages(settings) as pages, engine as opened, trio.open_nursery() as nursery:
                stop.spare(opening)
                serving = partial(serve, opened, settings, tracer=tracer, snapshots=True, pages=pages)
                for address in await nursery.start(serving):
                    on_listening(str(address))
                await stop.wait()
                nursery.cancel_scope.cancel()


async def _drain(server: GrpcServer, listeners: AioListeners, bound: Bound, settings: ServerSettings) -> int:
    """Returns how many calls were cut."""
    server.health.withdraw()
    open_calls = server.statistics().calls
    log.info(
        "server_draining", calls=open_calls, grace_secs=settings.withdraw_grace_secs, drain_secs=settings.drain_secs
    )
    if settings.withdraw_grace_secs > 0:
        await trio.sleep(settings.withdraw_grace_secs)
    listeners.close()
    bound.remove_files()
    server.refuse()
    with trio.move_on_after(settings.drain_secs):
        await run_aio(server.aio_wait_drained)
    cut = server.end_calls()
    with trio.move_on_after(END_CALLS_SECS):
        await run_aio(server.aio_wait_calls_ended)
    server.close_connections()
    with trio.move_on_after(CLOSE_SECS):
        await run_aio(server.aio_wait_disconnected)
    log.info("server_stopped", cut=cut)
    return cut
