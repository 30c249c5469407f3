"""The clients of the simulation, and Dynamo between them and the worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import attrs

from simulation.adapters import RECORD_SECS, SimLlm, Updater
from simulation.schedule import Act
from simulation.spans import trace_of
from support.fake_dynamo import WORKER_ID, Context, FakeDynamo, FakeDynamoError
from support.samples import HANDOFF
from trio_sidecar.bridge import aio_sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.schedule import ClientPlan, Schedule
    from trio_sidecar.worker.binding import Binding
    from trio_sidecar.worker.engine_object import EngineObject


@attrs.define(eq=False)
class Client:
    """One request, and what came of it.

    Attributes:
        started_at: When it was sent; None if it never was.
        stopped_at: When it was cancelled, or its client gave up or went.
        ended_at: When the client's side was over.
        tokens: All that were delivered.
        ends: Every end that was delivered: a finish reason, or the name of an error.
        usage: The terminal's.
        after_end: What was delivered after an end.
        left: The client stopped looking before an end.
        tokens_before_stop: How many had been delivered when it stopped.
    """

    plan: ClientPlan
    note: Callable[..., None]
    decode: bool = False
    started_at: float | None = None
    stopped_at: float | None = None
    ended_at: float | None = None
    tokens: list[int] = attrs.field(factory=list)
    ends: list[str] = attrs.field(factory=list)
    usage: Mapping[str, int] | None = None
    after_end: list[Any] = attrs.field(factory=list)
    left: bool = False
    tokens_before_stop: int = 0
    context: Context = attrs.field(init=False)
    _task: asyncio.Task[None] | None = None
    _generator: Any = None
    _timers: list[asyncio.TimerHandle] = attrs.field(factory=list)
    _aborts: list[asyncio.Task[None]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        """The request's id."""
        self.context = Context(f"request-{self.plan.number}", headers=trace_of(self.plan.number))

    def start(self, engine: EngineObject, loop: asyncio.AbstractEventLoop) -> None:
        """Send it."""
        self.started_at = loop.time()
        context = self.context
        prompt = [self.plan.number, *range(1, self.plan.prompt_tokens)]
        request: dict[str, object] = {"model": "served-model", "token_ids": prompt}
        if self.plan.adapter:
            request["routing"] = {"lora_name": self.plan.adapter}
        if self.decode:
            request["prefill_result"] = {"disaggregated_params": dict(HANDOFF)}
        self._generator = engine.generate(request, context)
        self._task = loop.create_task(self._aio_read(loop))

        def stop(act: Act) -> None:
            if self.ended_at is not None:
                return
            self.note("client_" + act.value, client=self.plan.number)
            if self.stopped_at is None:
                self.stopped_at = loop.time()
                self.tokens_before_stop = len(self.tokens)
            if act is Act.CLOSE:
                self.left = True
                assert self._task is not None
                self._task.cancel()
                return
            self.left = act is Act.VANISH
            context.stop()
            self._aborts.append(loop.create_task(engine.abort(context)))

        if self.plan.act is not Act.READ:
            self._timers.append(loop.call_later(self.plan.act_secs, stop, self.plan.act))
        self._timers.append(loop.call_later(self.plan.patience_secs, stop, Act.CANCEL))

    async def _aio_read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self._aio_take()
        except FakeDynamoError as error:
            self.ends.append(type(error).__name__)
            self.note("client_error", client=self.plan.number, kind=type(error).__name__, text=str(error))
        finally:
            self.ended_at = loop.time()
            for timer in self._timers:
                timer.cancel()
            if self.plan.act is Act.CLOSE:
                await self._generator.aclose()
            if self.left and self.plan.number % 2:
                self._generator = None  # dropped, as Dynamo drops it some time

    async def _aio_take(self) -> None:
        async for chunk in self._generator:
            if self.left:
                return
            if self.ends:
                self.after_end.append(chunk)
            ids = chunk["token_ids"]
            self.note("chunk", client=self.plan.number, ids=ids[:10], count=len(ids), end=chunk.get("finish_reason"))
            self.tokens += ids
            if "finish_reason" in chunk:
                self.ends.append(chunk["finish_reason"])
                self.usage = chunk["completion_usage"]
            if self.plan.pause_secs:
                await aio_sleep(self.plan.pause_secs)

    async def aio_wait(self) -> None:
        """Wait until its side is over."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def aio_end(self) -> None:
        """Wait until its side is over, and let go of everything."""
        if self._task is not None:
            await asyncio.wait([self._task, *self._aborts])
            if self._generator is not None:
                await self._generator.aclose()


@attrs.define(eq=False)
class SimEndpoint:
    """The worker's endpoint in Dynamo's discovery."""

    registered: bool = False

    async def register_endpoint_instance(self) -> None:
        """Let the router find the worker."""
        await aio_sleep(RECORD_SECS)
        self.registered = True

    async def unregister_endpoint_instance(self) -> None:
        """Hide the worker from the router."""
        await aio_sleep(RECORD_SECS)
        self.registered = False


@attrs.define(eq=False)
class SimPublisher:
    """Tells routers what one source of KV events says."""

    source: str
    running: bool = True

    def shutdown(self) -> None:
        """Tell nobody any more."""
        self.running = False


class SimDynamo(FakeDynamo):
    """Dynamo's runtime: sends clients' requests from the registration on, until the worker is gone.

    Attributes:
        clients: All of them.
        stop: Set when the process was asked to end.
        registered_once: Whether it came so far as to send requests.
    """

    def __init__(self, schedule: Schedule, note: Callable[..., None]) -> None:
        super().__init__()
        self.schedule = schedule
        self.note = note
        self.clients = [Client(plan, note, schedule.decode) for plan in schedule.clients]
        self.stop = asyncio.Event()
        self.registered_once = False
        self.llm = SimLlm()
        self.endpoint = SimEndpoint()
        self.publishers: list[SimPublisher] = []
        self.updater = Updater(note)
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def binding(self) -> Binding:
        """It, as the worker sees it."""
        return attrs.evolve(super().binding, llm=self.llm, kv_event_publisher=self._follow)

    def _follow(self, endpoint: object, *, zmq_endpoint: str, **_: object) -> SimPublisher:
        assert endpoint is self.endpoint
        self.publishers.append(SimPublisher(zmq_endpoint))
        return self.publishers[-1]

    @property
    def in_service(self) -> bool:
        """Whether the router finds the worker, and the worker takes its requests."""
        suspended = self.engine is not None and self.engine._sessions._suspended
        return self.endpoint.registered and not suspended

    async def run(self) -> None:
        """Drive the engine object to its end."""
        assert self.engine is not None
        engine, failure = self.engine, None
        try:
            self.engine_config = await engine.start(WORKER_ID)
            await self._aio_serve(engine)
        except FakeDynamoError as error:
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        await engine.cleanup()
        self.note("dynamo_cleaned_up")
        for timer in self._timers:
            timer.cancel()
        if failure is not None:
            raise failure

    async def aio_clients_ended(self) -> None:
        """Wait until no client takes anything any more."""
        for client in self.clients:
            await client.aio_wait()

    async def _aio_serve(self, engine: EngineObject) -> None:
        await engine.kv_event_sources()
        await engine.on_endpoint_ready(self.endpoint)
        await engine.health_check_payload()
        self.endpoint.registered = self.registered_once = True
        self.note("dynamo_registered")
        loop = asyncio.get_running_loop()
        for client in self.clients:
            self._timers.append(loop.call_later(client.plan.at, client.start, engine, loop))
        for update in self.schedule.updates:
            self._timers.append(loop.call_later(update.at, self.updater.start, update, engine, loop))
        await self.stop.wait()
        self.endpoint.registered = False
        self.note("dynamo_withdrawn")
        await aio_sleep(self.schedule.grace_secs)
        await engine.is_quiescent()
