"""Dynamo's front end: OpenAI over HTTP on one side, workers found by discovery on the other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.config import RouterMode
from trio_sidecar.endpoint import ListenAddress, cannot_listen
from trio_sidecar.errors import InvalidConfig, MissingExtra, SidecarError, cause_chain
from trio_sidecar.lifecycle import open_stop_signals
from trio_sidecar.worker.binding import missing_dynamo
from trio_sidecar.worker.errors import RuntimeFailed
from trio_sidecar.worker.etcd import discovery_backend, wait_for_etcd
from trio_sidecar.worker.traces import let_runtime_trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_sidecar.config import FrontendSettings
    from trio_sidecar.lifecycle import StopRequest

__all__ = ["FrontendBinding", "load_frontend_binding", "run_frontend"]

REQUEST_PLANE = ("DYN_REQUEST_PLANE", "tcp")
"""A variable of Dynamo that its own entry points read, with its default; its classes want the value."""

log = structlog.get_logger("trio_sidecar.frontend")


@attrs.frozen(slots=True, kw_only=True)
class FrontendBinding:
    """What a front end needs of Dynamo.

    Attributes:
        open_runtime: ``DistributedRuntime(event_loop, discovery_backend, request_plane)``; its ``shutdown()`` lets HTTP
            requests end and then makes ``aio_run_input`` return.
        aio_make_engine: Makes the engine that routes to workers, given the runtime, host, port and how a worker is
            chosen.
        aio_run_input: Serves HTTP with it.
    """

    open_runtime: Callable[[object, str, str], Any]
    aio_make_engine: Callable[[Any, str, int, RouterMode], Awaitable[Any]]
    aio_run_input: Callable[[Any, Any], Awaitable[None]]


def load_frontend_binding() -> FrontendBinding:
    """Import Dynamo's runtime.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        from dynamo import _core  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise missing_dynamo(error) from error

    modes = {
        RouterMode.ROUND_ROBIN: _core.RouterMode.RoundRobin,
        RouterMode.RANDOM: _core.RouterMode.Random,
        RouterMode.KV: _core.RouterMode.KV,
    }

    def make_engine(runtime: Any, host: str, port: int, mode: RouterMode) -> Awaitable[Any]:
        router = _core.RouterConfig(modes[mode], _core.KvRouterConfig() if mode is RouterMode.KV else None)
        kind = _core.EngineType.Dynamic
        arguments = _core.EntrypointArgs(kind, http_host=host, http_port=port, router_config=router)
        return _core.make_engine(runtime, arguments)

    def run_input(runtime: Any, engine: Any) -> Awaitable[None]:
        return _core.run_input(runtime, "http", engine)

    return FrontendBinding(open_runtime=_core.DistributedRuntime, aio_make_engine=make_engine, aio_run_input=run_input)


async def run_frontend(
    settings: FrontendSettings, *, binding: FrontendBinding | None = None, process_ends_after: bool = False
) -> int:
    """Serve HTTP until SIGTERM or SIGINT (Trio-flavoured, in the main thread).

    At the end, requests in flight may finish; Dynamo's ``DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS`` bounds that.

    Args:
        settings: Where to listen, and how to choose a worker.
        binding: Dynamo; by default the installed one.
        process_ends_after: The process ends next, so let no late signal spoil its exit code.

    Returns:
        The exit code: 0 if it was asked to end; 1 if it failed, with one line in the log that says why.

    Raises:
        InvalidConfig: The address cannot be listened on, or a variable of Dynamo's or OpenTelemetry's that we read
            holds no sense.
        MissingExtra: Dynamo is not installed.
    """
    try:
        os.environ.setdefault("DYN_LOG", "warn")
        let_runtime_trace(os.environ)  # before the import, which reads it
        binding = binding or load_frontend_binding()
        async with open_stop_signals(process_ends_after=process_ends_after) as stop:
            failure = await _serve(settings, binding, stop)
        if failure is not None:
            raise failure
    except (InvalidConfig, MissingExtra):
        raise  # the command line's to tell: one plain line and another exit code
    except SidecarError as error:
        log.error("frontend_failed", reason=cause_chain(error))
        return 1
    log.info("frontend_ended", reason=stop.reason)
    return 0


async def _serve(settings: FrontendSettings, binding: FrontendBinding, stop: StopRequest) -> SidecarError | None:
    """Serve until the stop.

    Returns:
        Why it ended, if nobody had asked it to.
    """
    discovery = discovery_backend(None, os.environ)
    try:
        await _check_address(settings)
        if discovery == "etcd":
            with stop.cancelling():
                await wait_for_etcd(os.environ)
            if stop.requested:
                return None
        runtime = binding.open_runtime(current_loop(), discovery, os.environ.get(*REQUEST_PLANE))
        where = (settings.http_host, settings.http_port)
        engine = await run_aio(binding.aio_make_engine, runtime, *where, settings.router_mode)
    except SidecarError as error:
        return error
    except Exception as error:  # noqa: BLE001 - Dynamo raises plain exceptions
        return RuntimeFailed(str(error))

    async def shut_down_on_stop() -> None:
        await stop.wait()
        runtime.shutdown()

    failure: SidecarError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shut_down_on_stop)
        nursery.start_soon(_report_listening, settings)
        try:
            await run_aio(binding.aio_run_input, runtime, engine)
        except Exception as error:  # noqa: BLE001 - Dynamo raises plain exceptions
            failure = RuntimeFailed(str(error))
        nursery.cancel_scope.cancel()
    if failure is None and not stop.requested:
        reason = "the front end ended without being asked to"
        failure = RuntimeFailed(reason)
    return failure


async def _check_address(settings: FrontendSettings) -> None:
    """Try the address before Dynamo does, because its message for one that cannot be used does not name the flags.

    Raises:
        InvalidConfig: It cannot be listened on.
    """
    try:
        listeners = await trio.open_tcp_listeners(settings.http_port, host=settings.http_host, backlog=1)
    except OSError as error:
        address = ListenAddress(host=settings.http_host, port=settings.http_port)
        raise cannot_listen(error, address) from error
    for listener in listeners:
        await listener.aclose()


async def _report_listening(settings: FrontendSettings) -> None:
    """Log once that the port answers; Dynamo does not say so itself."""
    while True:
        try:
            stream = await trio.open_tcp_stream(settings.http_host, settings.http_port)
        except OSError:
            await trio.sleep(0.05)
        else:
            await stream.aclose()
            log.info("frontend_listening", host=settings.http_host, port=settings.http_port)
            return
