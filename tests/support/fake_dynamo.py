"""Stands in for Dynamo's Python binding: drives a worker's engine object in the runtime's order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.bridge import AioEvent
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.errors import ErrorKind
from trio_sidecar.worker.binding import Binding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from trio_sidecar.worker.engine_object import EngineObject

WORKER_ID = 7


class FakeDynamoError(Exception):
    """Base of the exceptions that stand for Dynamo's; the class name is the kind."""


ERRORS = {kind: type(kind.value, (FakeDynamoError,), {}) for kind in ErrorKind}


@attrs.define(eq=False)
class Made:
    """A value that the worker made: the class's name and the arguments."""

    name: str
    positional: tuple[Any, ...]
    keywords: dict[str, Any]


@attrs.define(eq=False)
class Context:
    """What comes beside a request.

    Attributes:
        headers: Trace context and other headers.
        first_tokens: How often the worker announced a first token.
        futures: Those that wait for a cancel.
    """

    name: str = "request-1"
    stopped: bool = False
    headers: dict[str, str] = attrs.field(factory=dict)
    first_tokens: int = 0
    futures: list[asyncio.Future[bool]] = attrs.field(factory=list)

    def id(self) -> str:
        """The request's id."""
        return self.name

    def is_stopped(self) -> bool:
        """Whether it was cancelled."""
        return self.stopped

    def trace_headers(self) -> dict[str, str]:
        """Its headers."""
        return self.headers

    def stop(self) -> None:
        """The client cancels it."""
        self.stopped = True
        for future in self.futures:
            if not future.done():
                future.set_result(True)

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Done when it has been cancelled."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if self.stopped:
            future.set_result(True)
        return future

    def notify_first_token(self) -> None:
        """A decode request has its first token."""
        self.first_tokens += 1


@attrs.define(eq=False)
class FakeDynamo:
    """The runtime.

    Attributes:
        aio_serve: What happens between the registration and the cleanup.
        failure: Raised instead of serving, as Dynamo does if it cannot register.
        worker_config: What the worker wanted to register as.
        engine_config: What ``start`` returned.
        engine: The worker's engine object, once the worker has been made.
        endpoint: What the worker is given as its endpoint.
        registered: Set when it serves.
        metrics: The worker's callback for metrics.
    """

    aio_serve: Callable[[EngineObject], Awaitable[None]] | None = None
    failure: Exception | None = None
    worker_config: Made | None = None
    engine_config: Made | None = None
    engine: EngineObject | None = None
    sidecar_arguments: Sequence[str] | None = None
    endpoint: Any = attrs.field(factory=object)
    registered: AioEvent = attrs.field(factory=AioEvent)
    metrics: Callable[[], str] | None = None

    @property
    def binding(self) -> Binding:
        """It, as the worker sees it."""
        return Binding(
            worker=self._make_worker,
            worker_config=_maker("WorkerConfig"),
            engine_config=_maker("EngineConfig"),
            llm_registration=_maker("LlmRegistration"),
            runtime_config=_maker("RuntimeConfig"),
            modes={mode: mode.name for mode in DisaggregationMode},
            errors=ERRORS,
            run_vllm_sidecar=self._run_sidecar,
        )

    def _make_worker(self, engine: EngineObject, config: Made, loop: object, *, raw: bool) -> FakeDynamo:
        assert loop is not None
        assert raw is False
        self.engine, self.worker_config = engine, config
        return self

    async def run(self) -> None:
        """Drive the engine object to its end."""
        assert self.engine is not None
        failure = await self._aio_drive(self.engine)
        await self.engine.cleanup()
        if failure is not None:
            raise failure

    async def _aio_drive(self, engine: EngineObject) -> Exception | None:
        try:
            self.engine_config = await engine.start(WORKER_ID)
        except FakeDynamoError as error:
            return RuntimeError(f"{type(error).__name__}: {error}")
        await engine.register_prometheus(self)
        assert engine.component_metrics_dp_ranks() == []
        assert await engine.kv_event_sources() == []
        await engine.on_endpoint_ready(self.endpoint)
        assert engine.supported_controls() == []
        assert engine.supported_updates() == []
        assert await engine.health_check_payload() is None
        if self.failure is None:
            self.registered.set()
            if self.aio_serve is not None:
                await self.aio_serve(engine)
            assert isinstance(await engine.is_quiescent(), bool)
        return self.failure

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Keep the callback, as Dynamo does."""
        self.metrics = callback

    def _run_sidecar(self, arguments: Sequence[str]) -> None:
        self.sidecar_arguments = arguments


def _maker(name: str) -> Callable[..., Made]:
    def make(*positional: Any, **keywords: Any) -> Made:
        return Made(name, positional, keywords)

    return make
