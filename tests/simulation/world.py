"""One run of the simulation: a whole worker between Dynamo and an engine, all in memory and in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sys
import traceback
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import structlog
import trio

from simulation import invariants
from simulation.client import SimDynamo
from simulation.determinism import determined
from simulation.engine import HOST, PORT, SimEngine
from simulation.schedule import make_schedule
from simulation.spans import SpanBook, check_spans
from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.bridge.virtual import START_SECS, NeverEnds, run_virtual
from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.testing.network import Network
from trio_sidecar.worker.dynamo import run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, MutableMapping

    from simulation.schedule import Schedule
    from trio_sidecar.engines.remote import RemoteEngine
    from trio_sidecar.testing.network import Link

__all__ = ["Result", "World", "run_seed"]

SETTLE_SECS = 3.0
"""How long the network may take after the end until everybody has heard of it."""

SLOW_CLIENT_SECS = 60.0
"""How long a slow client may still take what was there for it; a process would not wait for that."""

MAX_ROUNDS = 400_000
TROUBLE = ("error", "critical", "exception")


@attrs.define(eq=False)
class Result:
    """What came of one run.

    Attributes:
        seed: Its seed.
        faults: Every invariant that did not hold.
        trace: What happened, in order.
    """

    seed: int
    faults: list[str] = attrs.field(factory=list)
    trace: list[str] = attrs.field(factory=list)

    @property
    def digest(self) -> str:
        """Equal for equal traces."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class World:
    """Everything in one run.

    Attributes:
        code: The worker's exit code.
        stopped_at: When SIGTERM came.
        ended_at: When the worker had ended.
        trouble: What was logged as an error.
        remote: The engine, as the worker has opened it.
        held_since: When a connection with a request was first seen to carry nothing.
        spans: All that the worker has made.
    """

    def __init__(self, schedule: Schedule, result: Result) -> None:
        self.schedule = schedule
        self.result = result
        self.code: int | None = None
        self.stopped_at: float | None = None
        self.ended_at: float | None = None
        self.trouble: list[str] = []
        self.remote: RemoteEngine | None = None
        self.network: Network
        self.engine: SimEngine
        self.dynamo: SimDynamo
        self.left_over: list[str] = []
        self.held_since: dict[Link, float] = {}
        self.spans = SpanBook()
        self._loop: Any = None

    def note(self, event: str, **fields: object) -> None:
        """Add a line to the trace."""
        at = 0.0 if self._loop is None else self._loop.time() - START_SECS
        self.result.trace.append(f"{at:.6f} {event} " + " ".join(f"{name}={fields[name]!r}" for name in fields))

    def fault(self, text: str) -> None:
        """An invariant did not hold."""
        self.note("FAULT", text=text)
        self.result.faults.append(text)

    def on_log(self, logger: object, level: str, event: MutableMapping[str, Any]) -> Any:
        """Take a log line into the trace."""
        del logger
        error = event.pop("exc_info", None)
        name = str(event.pop("event"))
        self.note(name, **event)
        if level in TROUBLE:
            if error is True:
                error = sys.exc_info()[1]
            shown = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
            self.trouble.append(f"{name} {event} {shown}")
        raise structlog.DropEvent

    @asynccontextmanager
    async def open_engine(self, *, bootstrap: bool) -> AsyncIterator[RemoteEngine]:
        """What the worker opens."""
        async with open_remote(self.settings.transport, bootstrap=bootstrap) as self.remote:
            yield self.remote

    @property
    def settings(self) -> WorkerSettings:
        """The worker's."""
        schedule = self.schedule
        return WorkerSettings(
            transport=TransportSettings(
                grpc_endpoint=GrpcEndpoint.parse(f"{HOST}:{PORT}"),
                grpc_connections=schedule.connections,
                grpc_connect_attempt_timeout_secs=invariants.ATTEMPT_SECS,
                grpc_retry_interval_secs=0.2,
                grpc_startup_deadline_secs=60.0,
                keepalive_secs=invariants.KEEPALIVE_SECS if schedule.keepalive else 30.0,
                keepalive_timeout_secs=invariants.KEEPALIVE_SECS if schedule.keepalive else 20.0,
            ),
            withdraw_grace_secs=schedule.grace_secs,
            drain_secs=schedule.drain_secs,
            coalesce=schedule.coalesce,
            hang_check_secs=schedule.hang_secs,
            lora_enabled=schedule.lora,
            disaggregation_mode=DisaggregationMode.DECODE if schedule.decode else DisaggregationMode.AGGREGATED,
        )

    def stop(self) -> None:
        """SIGTERM, if the worker is there to get it."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return
        if self.stopped_at is None:
            self.stopped_at = trio.current_time()
        self.note("sigterm")
        signal.raise_signal(signal.SIGTERM)
        self.dynamo.stop.set()

    async def run(self) -> None:
        """Play the schedule."""
        loop = self._loop = current_loop()
        schedule = self.schedule
        network = self.network = Network(
            random.Random(f"network {schedule.seed}"),
            max_secs=schedule.packet_secs,
            cut_probability=schedule.cut_probability,
        )
        self.engine = SimEngine(schedule, network, self.note)
        self.dynamo = SimDynamo(schedule, self.note)
        timers = [loop.call_later(schedule.stop_at, self.stop)]
        if schedule.stop_again_secs >= 0:
            timers.append(loop.call_later(schedule.stop_at + schedule.stop_again_secs, self.stop))
        self.engine.start()
        with network.installed():
            tasks_before = trio.lowlevel.current_statistics().tasks_living
            async with trio.open_nursery() as nursery:
                nursery.start_soon(invariants.watch, self)
                self.code = await run_worker(
                    self.settings, self.open_engine, binding=self.dynamo.binding, tracer=self.spans
                )
                self.ended_at = trio.current_time()
                nursery.cancel_scope.cancel()
            self.note("worker_returned", code=self.code)
            for timer in timers:
                timer.cancel()
            await self._settle(tasks_before)
        invariants.check(self)
        check_spans(self)

    async def _settle(self, tasks_before: int) -> None:
        """Let the network run empty, and see what is left."""
        self.engine.end_of_faults()
        await trio.sleep(SETTLE_SECS)
        with trio.move_on_after(SLOW_CLIENT_SECS):
            await run_aio(self.dynamo.aio_clients_ended)
        for client in self.dynamo.clients:
            if client.started_at is not None and client.ended_at is None:
                self.fault(f"request {client.plan.number} has not ended, though the worker has")
                return
        current = trio.lowlevel.current_statistics().tasks_living - tasks_before
        if current:
            self.left_over.append(f"{current} tasks of Trio")
        for client in self.dynamo.clients:
            await run_aio(client.aio_end)
        self.left_over += [f"update {task.get_coro()}" for task in self.dynamo.updater.tasks if not task.done()]
        for task in self.dynamo.updater.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.fault(f"an update raised {error!r}")
        self.left_over += [f"asyncio task {task.get_coro()}" for task in asyncio.all_tasks(self._loop)]
        self.left_over += [f"timer {handle}" for handle in self._loop._scheduled if not handle.cancelled()]


@contextlib.contextmanager
def _logging_to(world: World) -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(
        processors=[world.on_log],
        wrapper_class=structlog.BoundLogger,
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def run_seed(seed: int) -> Result:
    """Play one schedule; the result says what was wrong."""
    schedule = make_schedule(seed)
    result = Result(seed)
    world = World(schedule, result)
    environment = dict(os.environ)
    os.environ.pop("DYN_SYSTEM_PORT", None)
    try:
        with determined(seed), _logging_to(world):
            run_virtual(world.run, random=random.Random(f"turns {seed}"), rounds=MAX_ROUNDS)
    except NeverEnds as error:
        result.faults.append(f"hangs: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        result.faults.append("".join(traceback.format_exception(error)))
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return result
