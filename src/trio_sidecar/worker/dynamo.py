"""The face beside Dynamo, over any engine of the contract.

A worker looks at the engine over one connection first, because Dynamo wants to know the model before it starts anything
(R5.7). Then Dynamo's runtime takes over and calls back: start, requests, cleanup.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.config.fields import check_duration, duration
from trio_sidecar.convert.request import convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.deadline import Deadline
from trio_sidecar.discovery import discover
from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.engines.remote import RemoteEngine, open_remote
from trio_sidecar.errors import ErrorKind, InvalidConfig, SidecarError, cause_chain
from trio_sidecar.health_wait import wait_until_serving
from trio_sidecar.lifecycle import open_stop_signals, settle_collector
from trio_sidecar.metrics import watch_lag
from trio_sidecar.recovery import Recovery, RecoverySettings
from trio_sidecar.requests.hang import HangCheck
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.tracing import NO_TRACES
from trio_sidecar.worker.binding import load_binding
from trio_sidecar.worker.engine_object import EngineObject
from trio_sidecar.worker.errors import RuntimeFailed
from trio_sidecar.worker.etcd import discovery_backend, wait_for_etcd
from trio_sidecar.worker.life import Started, WorkerLife
from trio_sidecar.worker.management import Management
from trio_sidecar.worker.metrics import WorkerMetrics
from trio_sidecar.worker.probes import open_pages, open_probes, system_port
from trio_sidecar.worker.registration import check_suitable, engine_config, model_facts, worker_config
from trio_sidecar.worker.snapshot import log_snapshots
from trio_sidecar.worker.traces import let_runtime_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.config import TransportSettings, WorkerSettings
    from trio_sidecar.discovery import DiscoveredModel
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.lifecycle import StopRequest
    from trio_sidecar.requests.contract import Converted
    from trio_sidecar.tracing import Tracer
    from trio_sidecar.worker.binding import Binding

__all__ = ["OpenEngine", "run_worker"]

CONTROL = "vllm.Control"
INFERENCE = "vllm.Inference"

TRANSIENT = (ErrorKind.CANNOT_CONNECT, ErrorKind.CONNECTION_TIMEOUT, ErrorKind.ENGINE_SHUTDOWN)
"""Kinds of failure that an engine which is still starting may show (R5.12)."""

WATCHDOG_SECS = 10.0
"""Dynamo kills a worker that is slower to shut down than its drain budget, in seconds more than the budget itself."""

PREFILL_DRAIN = ("DYN_PREFILL_DRAIN_TIMEOUT_S", "10")
"""Dynamo's variable, with its default: how long a prefill worker waits for decode peers to fetch what it holds."""

LINGER_SECS = 0.1
"""How long the process stays after a drain, so that Dynamo's threads can send the last chunks."""

log = structlog.get_logger("trio_sidecar.worker")


class OpenEngine(Protocol):
    """Opens the engine; called once to look at it, and once to serve with it."""

    def __call__(self, *, bootstrap: bool) -> AbstractAsyncContextManager[Engine]:
        """Open it (Trio-flavoured); with ``bootstrap`` over exactly one connection."""
        ...


async def run_worker(
    settings: WorkerSettings,
    open_engine: OpenEngine | None = None,
    *,
    binding: Binding | None = None,
    tracer: Tracer = NO_TRACES,
    process_ends_after: bool = False,
) -> int:
    """Register with Dynamo and serve until SIGTERM or SIGINT (Trio-flavoured, in the main thread).

    Args:
        settings: What to serve as, and where the engine is.
        open_engine: Opens the engine; by default the remote one of the settings.
        binding: Dynamo; by default the installed one.
        tracer: Makes the spans; without one, the trace contexts of requests go on to the engine all the same.
        process_ends_after: The process is the worker's own and ends next: let no late signal spoil its exit code, and
            set its garbage collector for a token stream.

    Returns:
        The exit code: 0 if it was asked to end, at whatever point; 1 if it failed, with one line in the log that says
        why.

    Raises:
        InvalidConfig: A setting, or a variable of Dynamo's that we read, is wrong or does not go with the engine.
        MissingExtra: Dynamo is not installed.
    """
    configure_runtime(settings, os.environ)
    binding = binding or load_binding()
    wrong: InvalidConfig | None = None
    if open_engine is None:

        def open_engine(*, bootstrap: bool) -> AbstractAsyncContextManager[Engine]:
            return open_remote(settings.transport, bootstrap=bootstrap)

    async with open_stop_signals(process_ends_after=process_ends_after) as stop:
        try:
            sessions = _sessions(settings, tracer)
            metrics = WorkerMetrics(sessions=sessions, stop=stop, role=settings.disaggregation_mode.value)
            async with open_pages(settings.metrics_port, os.environ, metrics):
                async with open_probes(os.environ, metrics):
                    model = await _look(settings, open_engine, stop)
                # A look that has succeeded must still not start a worker if a stop came meanwhile (R11.8).
                if model is not None and not stop.requested:
                    if process_ends_after:
                        settle_collector()
                    check_suitable(settings, model)  # first, because the wait may be long
                    if binding.waits_for_etcd and discovery_backend(settings.discovery_backend, os.environ) == "etcd":
                        with stop.cancelling():
                            await wait_for_etcd(os.environ)
                if model is not None and not stop.requested:
                    await _serve(settings, open_engine, binding, metrics, model, tracer=tracer)
        except InvalidConfig as error:
            wrong = error  # the command line's to tell: one plain line and another exit code
        except SidecarError as error:
            return _failed(error)
    if wrong is not None:
        raise wrong
    log.info("worker_ended", reason=stop.reason)
    return 0


def _failed(error: SidecarError) -> int:
    log.error("worker_failed", reason=cause_chain(error))
    log.debug("worker_failed_at", exc_info=error)
    return 1


def configure_runtime(settings: WorkerSettings, environment: MutableMapping[str, str]) -> None:
    """Tell Dynamo's runtime, which reads some settings from the environment only, what ours say.

    Raises:
        InvalidConfig: A variable of Dynamo's or OpenTelemetry's that we read holds no sense.
    """
    environment["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = f"{settings.withdraw_grace_secs:g}"
    drain_secs = settings.drain_secs + WATCHDOG_SECS
    if settings.disaggregation_mode is DisaggregationMode.PREFILL:
        # Dynamo waits that long before it calls cleanup, and its watchdog runs meanwhile (R11.14).
        wait = duration(environment.get(*PREFILL_DRAIN), PREFILL_DRAIN[0])
        check_duration(wait, PREFILL_DRAIN[0], zero=True)
        drain_secs += wait
    environment["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"] = str(math.ceil(drain_secs))
    environment.setdefault("DYN_LOG", "warn")
    let_runtime_trace(environment)
    if system_port(environment) is None:
        # Without a system server there is nothing to host metadata on; this saves a warning at each start.
        environment.setdefault("DYN_SELF_HOST_METADATA", "0")
    else:
        # Whether this process lives does not depend on the engine (R15.17).
        environment.setdefault("DYN_SYSTEM_STARTING_HEALTH_STATUS", "ready")


async def _look(settings: WorkerSettings, open_engine: OpenEngine, stop: StopRequest) -> DiscoveredModel | None:
    """Find out what the engine serves; None if a stop came first (R5.7, R11.7)."""
    model: DiscoveredModel | None = None
    with stop.cancelling():
        async with open_engine(bootstrap=True) as engine:
            model = await _discover(settings, engine, (CONTROL,))
    return model


async def _discover(settings: WorkerSettings, engine: Engine, services: Sequence[str]) -> DiscoveredModel:
    """Wait until the engine serves, then ask what it is; again if it goes away in between (R5.7 to R5.12).

    Each phase has a fresh budget, because a slow first phase must not use up the second one's (FR-032).
    """
    transport = settings.transport
    deadline = Deadline.after(transport.grpc_startup_deadline_secs)
    while True:
        try:
            await wait_until_serving(engine, services, deadline, transport.grpc_retry_interval_secs)
            return (await discover(engine, deadline)).standing_for(settings.dp_ranks)
        except SidecarError as error:
            if error.kind not in TRANSIENT or deadline.expired():
                raise
            log.info("engine_went_away", reason=str(error), remaining_secs=round(deadline.remaining(), 3))
        await trio.sleep(deadline.sooner_of(transport.grpc_retry_interval_secs))


def _sessions(settings: WorkerSettings, tracer: Tracer) -> Sessions:
    return Sessions(
        responder=ResponseConverter,
        merge=merge_chunks,
        coalesce=settings.coalesce,
        role=settings.disaggregation_mode.value,
        silence=SilenceLimits(first_response_secs=settings.first_response_secs, idle_secs=settings.idle_secs),
        max_open=settings.max_inflight_requests,
        tracer=tracer,
    )


def _recovery_settings(transport: TransportSettings) -> RecoverySettings:
    return RecoverySettings(
        retry_secs=transport.grpc_retry_interval_secs, startup_secs=transport.grpc_startup_deadline_secs
    )


def _converter(model: DiscoveredModel, settings: WorkerSettings) -> Callable[[Mapping[str, object], str], Converted]:
    facts = model_facts(model, settings)

    def convert(request: Mapping[str, object], request_id: str) -> Converted:
        return convert_request(request, request_id=request_id, model=facts)

    return convert


def _hang_check(
    settings: WorkerSettings, engine: Engine, sessions: Sessions, model: DiscoveredModel
) -> HangCheck | None:
    # An encode engine makes no tokens.
    if not settings.hang_check_secs or settings.disaggregation_mode is DisaggregationMode.ENCODE:
        return None
    return HangCheck(
        aio_generate=engine.aio_probe if isinstance(engine, RemoteEngine) else engine.aio_generate,
        metadata={} if settings.dp_ranks is None else {RANK_METADATA_KEY: str(model.ranks.start)},
        sessions=sessions,
        model=model.served_model_name,
        silent_secs=settings.hang_check_secs,
    )


async def _serve(
    settings: WorkerSettings,
    open_engine: OpenEngine,
    binding: Binding,
    metrics: WorkerMetrics,
    looked_at: DiscoveredModel,
    *,
    tracer: Tracer,
) -> None:
    """Let Dynamo drive until it ends.

    Raises:
        SidecarError: It ended though nobody had asked.
    """
    config = worker_config(binding, settings, looked_at)
    mode = settings.disaggregation_mode
    sessions, stop = metrics.sessions, metrics.stop
    management = Management(binding, settings, looked_at)

    async def start_up(engine: Engine) -> Started:
        model = await _discover(settings, engine, (CONTROL, INFERENCE))
        looked_at.check_same_engine(model)
        config = engine_config(binding, settings, model)
        attached = management.attach(engine, model)
        recovery = Recovery(
            engine=engine,
            model=looked_at,
            sessions=sessions,
            availability=management,
            stop=stop,
            tracer=tracer,
            reconnected=engine.reconnected if isinstance(engine, RemoteEngine) else trio.sleep_forever,
            settings=_recovery_settings(settings.transport),
            hang=_hang_check(settings, engine, sessions, model),
        )
        recovery.follow(model)
        metrics.attach(engine, model, recovery)
        return Started(config=config, convert=_converter(model, settings), engine=attached, watch=recovery.run)

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        life = WorkerLife(
            nursery=nursery,
            stop=stop,
            sessions=sessions,
            open_engine=lambda: open_engine(bootstrap=False),
            start_up=start_up,
            drain_secs=settings.drain_secs,
        )
        nursery.start_soon(log_snapshots, sessions)
        nursery.start_soon(watch_lag, metrics.lag)
        management.work_in(nursery)
        engine_object = EngineObject(binding, life, sessions, mode=mode, management=management, metrics=metrics)
        try:
            await run_aio(binding.aio_run, engine_object, config, current_loop())
        except Exception as error:  # noqa: BLE001 - explained below
            failure = error
        nursery.cancel_scope.cancel()
    if stop.requested:
        await trio.sleep(LINGER_SECS)
        return
    if life.failure is not None:
        raise life.failure
    reason = str(failure or "it ended without being asked to")
    raise RuntimeFailed(reason) from failure
