"""A worker's life from its first look at the engine to its exit code, with a stand-in for Dynamo, in virtual time."""

from __future__ import annotations

import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import pytest
import structlog
import trio

from support.exposition import values
from support.fake_dynamo import ERRORS, Context, FakeDynamo, FakeDynamoError
from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint, aio_in_thread, aio_now, aio_sleep
from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError, ErrorKind, InvalidConfig, MissingExtra, RpcError, StatusCode
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import FakeEngine, Gate, Script, Send, Wait, finish, tokens
from trio_sidecar.worker.dynamo import _hang_check, configure_runtime, run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio.testing import MockClock

    from trio_sidecar.worker.binding import Binding
    from trio_sidecar.worker.engine_object import EngineObject

Status = wire.HealthCheckResponseServingStatus
REQUEST: dict[str, object] = {"model": "served-model", "token_ids": [11, 22, 33]}
VARIABLES = (
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
    "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
    "DYN_LOG",
    "DYN_SELF_HOST_METADATA",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker sets for Dynamo is undone."""
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


def new_engine(**options: Any) -> FakeEngine:
    """An engine that serves."""
    model = wire.ModelInfo(
        model_id="model-source",
        served_model_name="served-model",
        served_model_aliases=["model-alias"],
        supports_text_input=True,
        supports_token_ids_input=True,
    )
    return FakeEngine(
        answers={
            "GetModelInfo": model,
            "GetServerInfo": wire.ServerInfo(api_version="vllm", max_model_len=8192),
            "GetKvEventSources": wire.GetKvEventSourcesResponse(),
        },
        health={"vllm.Control": Status.SERVING, "vllm.Inference": Status.SERVING},
        **options,
    )


@attrs.define(eq=False)
class World:
    """A worker with its engine and its Dynamo.

    Attributes:
        open_failure: Raised instead of opening the engine.
        opened: How the engine was opened, each time.
        closed: How often it was closed again.
    """

    engine: FakeEngine = attrs.field(factory=new_engine)
    dynamo: FakeDynamo = attrs.field(factory=FakeDynamo)
    open_failure: Exception | None = None
    opened: list[bool] = attrs.field(factory=list)
    closed: int = 0

    @asynccontextmanager
    async def open_engine(self, *, bootstrap: bool) -> AsyncIterator[FakeEngine]:
        """Open the engine."""
        if self.open_failure is not None:
            raise self.open_failure
        self.opened.append(bootstrap)
        try:
            yield self.engine
        finally:
            self.closed += 1

    async def run(self, **changes: Any) -> tuple[int, list[str]]:
        """Run the worker; its exit code, and the reasons that it logged for a failure."""
        transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"), grpc_startup_deadline_secs=60)
        settings = WorkerSettings(transport=transport, **changes)
        with structlog.testing.capture_logs() as logs, trio.fail_after(1000):
            code = await run_worker(settings, self.open_engine, binding=self.dynamo.binding)
        assert self.closed == len(self.opened)
        return code, [entry["reason"] for entry in logs if entry["event"] == "worker_failed"]


@attrs.define(eq=False)
class Client:
    """Sends one request through the engine object, as Dynamo would for a client."""

    chunks: list[Mapping[str, Any]] = attrs.field(factory=list)
    error: FakeDynamoError | None = None

    context: Context = attrs.field(factory=Context)

    async def aio_ask(self, engine: EngineObject, **request: object) -> None:
        """Ask and take everything."""
        try:
            async for chunk in engine.generate(REQUEST | request, self.context):
                self.chunks.append(chunk)
        except FakeDynamoError as error:
            self.error = error


async def aio_stop(engine: EngineObject) -> None:
    """What a runtime does that gets SIGTERM: it returns from serving."""
    await aio_checkpoint()
    signal.raise_signal(signal.SIGTERM)


async def test_dynamo_shows_our_metrics(aio_loop: object) -> None:
    """The callback that Dynamo is given tells of the requests, on whichever thread it is called."""
    seen: list[dict[str, float]] = []

    async def aio_serve(engine: EngineObject) -> None:
        assert world.dynamo.metrics is not None
        await Client().aio_ask(engine)
        await aio_checkpoint()
        seen.append(values(await aio_in_thread(world.dynamo.metrics)))
        await aio_stop(engine)

    world = World(new_engine(script=Script(stream=[Send(tokens(7)), Send(finish(8, total=2))])), FakeDynamo(aio_serve))
    assert (0, []) == await world.run()
    (found,) = seen
    assert (1, 2) == (found["requests_accepted_total{role=agg}"], found["output_tokens_total{role=agg}"])
    assert 1 == found["engine_state{state=serving}"]


async def test_pages_of_our_own(aio_loop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the engine, while it serves and until the end, and health is true each time."""
    monkeypatch.setenv("DYN_SYSTEM_HOST", "127.0.0.1")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port: int = listener.socket.getsockname()[1]
    seen: list[tuple[int, str]] = []

    def look() -> None:
        answer = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=10, trust_env=False)
        seen.append((answer.status_code, answer.text))

    class Seen(World):
        @asynccontextmanager
        async def open_engine(self, *, bootstrap: bool) -> AsyncIterator[FakeEngine]:
            async with super().open_engine(bootstrap=bootstrap) as engine:
                if bootstrap:
                    await trio.to_thread.run_sync(look)
                yield engine

    async def aio_serve(engine: EngineObject) -> None:
        await aio_in_thread(look)
        await aio_stop(engine)
        while len(seen) < 3 or seen[-1][0] == httpx2.codes.OK:  # until the signal has arrived
            await aio_in_thread(look)

    assert (0, []) == await Seen(dynamo=FakeDynamo(aio_serve)).run(metrics_port=port)
    assert [(503, "starting\n"), (200, "serving\n"), (503, "draining\n")] == sorted(set(seen), key=seen.index)


@pytest.mark.rule("R5.7", "R5.8", "R5.10")
async def test_whole_life(aio_loop: object) -> None:
    """A worker looks over one connection, opens the whole pool when Dynamo starts it, answers, and exits with 0."""
    client = Client()

    async def aio_serve(engine: EngineObject) -> None:
        await client.aio_ask(engine)
        await aio_stop(engine)

    world = World(new_engine(script=Script(stream=[Send(tokens(7)), Send(finish(8, total=2))])), FakeDynamo(aio_serve))
    assert (0, []) == await world.run()
    assert [True, False] == world.opened
    assert [7, 8] == [token for chunk in client.chunks for token in chunk["token_ids"]]
    assert "length" == client.chunks[-1]["finish_reason"]
    assert world.dynamo.worker_config is not None
    assert "model-source" == world.dynamo.worker_config.keywords["model_name"]
    assert world.dynamo.engine_config is not None
    assert ["model-alias"] == world.dynamo.engine_config.keywords["model_aliases"]
    described = [name for name, _ in world.engine.calls]
    assert ["GetModelInfo", "GetServerInfo", "GetModelInfo", "GetServerInfo", "GetKvEventSources"] == described


@pytest.mark.rule("10.2", "7.10", "R2.12", "FR-003")
async def test_whole_life_of_a_decode_worker(aio_loop: object) -> None:
    """The role decides what is registered, what a request becomes, and when a cancel acts."""
    client = Client(context=Context(stopped=True))
    handoff = {"do_remote_prefill": True, "remote_port": 20097}

    async def aio_serve(engine: EngineObject) -> None:
        await client.aio_ask(engine, prefill_result={"disaggregated_params": handoff})
        await aio_stop(engine)

    world = World(new_engine(script=Script(stream=[Send(tokens(7)), Gate()])), FakeDynamo(aio_serve))
    assert (0, []) == await world.run(disaggregation_mode=DisaggregationMode.DECODE)
    assert world.dynamo.worker_config is not None
    assert "backend" == world.dynamo.worker_config.keywords["component"]
    (received,) = world.engine.requests
    assert received.request.kv is not None
    assert received.request.kv.kv_transfer_params is not None
    assert "20097" == received.request.kv.kv_transfer_params.fields["remote_port"].string_value
    assert ["cancelled"] == [chunk["finish_reason"] for chunk in client.chunks]
    assert 1 == client.context.first_tokens


@pytest.mark.rule("R11.7")
async def test_drain(aio_loop: object, autojump_clock: MockClock) -> None:
    """Cleanup waits for a request that can end within the budget, which it does unharmed."""
    client = Client()
    slow = Script(stream=[Wait(20), Send(tokens(7)), Wait(9), Send(finish(8, total=2))])
    world = World(new_engine(script=slow))
    began = 0.0

    async def aio_serve(engine: EngineObject) -> None:
        nonlocal began
        aio_loop.create_task(client.aio_ask(engine))  # type: ignore[attr-defined]
        await aio_sleep(1)
        began = aio_now()
        await aio_stop(engine)

    world.dynamo.aio_serve = aio_serve
    assert (0, []) == await world.run(drain_secs=30.0)
    assert began + 28 == pytest.approx(trio.current_time(), abs=1)
    assert [7, 8] == [token for chunk in client.chunks for token in chunk["token_ids"]]
    assert client.error is None


@pytest.mark.rule("R11.3")
async def test_drain_budget_used_up(aio_loop: object, autojump_clock: MockClock) -> None:
    """A request that outlives the budget gets a typed error, the engine is released, and the exit code is still 0."""
    client = Client()
    world = World(new_engine(script=Script(stream=[Send(tokens(7)), Gate()])))

    async def aio_serve(engine: EngineObject) -> None:
        aio_loop.create_task(client.aio_ask(engine))  # type: ignore[attr-defined]
        await aio_sleep(1)
        await aio_stop(engine)

    world.dynamo.aio_serve = aio_serve
    before = trio.current_time()
    assert (0, []) == await world.run(drain_secs=30.0)
    assert 31 == pytest.approx(trio.current_time() - before, abs=1)
    assert [[7]] == [chunk["token_ids"] for chunk in client.chunks]
    assert type(client.error) is ERRORS[ErrorKind.ENGINE_SHUTDOWN]
    assert 0 == world.engine.open_streams


@pytest.mark.parametrize(
    ("changes", "secs", "metadata"),
    [
        ({}, 60.0, {}),
        ({"hang_check_secs": 5.0, "dp_ranks": range(1)}, 5.0, {"x-data-parallel-rank": "0"}),
        ({"hang_check_secs": 0.0}, None, None),
        ({"disaggregation_mode": DisaggregationMode.ENCODE}, None, None),
    ],
)
async def test_who_asks_whether_the_engine_hangs(  # noqa: ASYNC124 - its loop is Trio's guest
    aio_loop: object, changes: dict[str, Any], secs: float | None, metadata: dict[str, str] | None
) -> None:
    """All workers but those that were told not to, and those whose engine makes no tokens."""
    world = World()
    model = DiscoveredModel.from_messages(world.engine.answers["GetModelInfo"], world.engine.answers["GetServerInfo"])
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"))
    settings = WorkerSettings(transport=transport, **changes)
    check = _hang_check(settings, world.engine, sessions, model)
    assert secs == (check and check.silent_secs)
    if check is not None:
        expected = (world.engine.aio_generate, "served-model", metadata)
        assert expected == (check.aio_generate, check.model, check.metadata)


@pytest.mark.rule("R11.7", "R11.12")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_stop_while_waiting_for_the_engine(
    aio_loop: object, autojump_clock: MockClock, signum: signal.Signals
) -> None:
    """A stop while the engine is not there yet ends the worker at once with 0, and Dynamo never hears of it."""
    world = World()
    world.engine.health = dict.fromkeys(world.engine.health, Status.NOT_SERVING)

    async def stop_later() -> None:
        await trio.sleep(5.5)
        signal.raise_signal(signum)

    before = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_later)
        assert (0, []) == await world.run()
    assert 5.5 == pytest.approx(trio.current_time() - before)
    assert world.dynamo.engine is None


@pytest.mark.rule("R11.7", "R11.8", "R11.12")
async def test_stop_while_the_engine_starts(aio_loop: object, autojump_clock: MockClock) -> None:
    """A stop while Dynamo waits for the engine to start makes the start fail at once; the exit code is 0."""
    world = World()
    world.engine.health["vllm.Inference"] = Status.NOT_SERVING

    async def stop_later() -> None:
        await trio.sleep(5.5)
        signal.raise_signal(signal.SIGTERM)

    before = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_later)
        assert (0, []) == await world.run()
    assert 6 > trio.current_time() - before
    assert world.dynamo.engine is not None
    assert not world.dynamo.registered.is_set()


@pytest.mark.rule("FR-032")
async def test_each_phase_has_its_own_budget(aio_loop: object, autojump_clock: MockClock) -> None:
    """An engine that needs most of the deadline in each of two phases is still served."""
    world = World(dynamo=FakeDynamo(aio_stop))
    world.engine.health = dict.fromkeys(world.engine.health, Status.NOT_SERVING)

    async def get_ready() -> None:
        for service in ("vllm.Control", "vllm.Inference"):
            await trio.sleep(50)
            world.engine.health[service] = Status.SERVING

    async with trio.open_nursery() as nursery:
        nursery.start_soon(get_ready)
        assert (0, []) == await world.run()
    assert world.dynamo.registered.is_set()


@pytest.mark.rule("R5.6")
async def test_engine_that_is_never_ready(aio_loop: object, autojump_clock: MockClock) -> None:
    """At the deadline the worker fails with one line that says what it waited for."""
    world = World()
    world.engine.health = dict.fromkeys(world.engine.health, Status.NOT_SERVING)
    code, reasons = await world.run()
    assert 1 == code
    assert 1 == len(reasons)
    assert "vllm.Control did not become SERVING" in reasons[0]


@pytest.mark.rule("R5.12")
async def test_engine_goes_away_between_health_and_discovery(aio_loop: object, autojump_clock: MockClock) -> None:
    """An engine that restarts while it is looked at is waited for again."""
    world = World(dynamo=FakeDynamo(aio_stop))
    answer = world.engine.answers["GetModelInfo"]
    failures: list[Exception] = [RpcError(StatusCode.UNAVAILABLE, "restarting"), ConnectError("no connection left")]
    world.engine.answers["GetModelInfo"] = lambda request: failures.pop() if failures else answer
    assert (0, []) == await world.run()
    assert [] == failures


@pytest.mark.rule("R6.11")
async def test_another_engine_at_start(aio_loop: object) -> None:
    """An engine that is not the one that was looked at is refused, with one line that says what differs."""
    world = World()
    models = [
        world.engine.answers["GetModelInfo"],
        wire.ModelInfo(model_id="other", served_model_name="served-model", supports_token_ids_input=True),
    ]
    world.engine.answers["GetModelInfo"] = lambda request: models.pop(0)
    code, reasons = await world.run()
    assert 1 == code
    assert 1 == len(reasons)
    assert "identity changed: model_id was 'model-source', is 'other'" in reasons[0]
    assert not world.dynamo.registered.is_set()


async def test_engine_that_cannot_be_opened(aio_loop: object) -> None:
    """A failure to connect is one line and exit code 1."""
    reason = "cannot connect to vLLM at http://127.0.0.1:1: pool slot 1 failed"
    assert (1, [reason]) == await World(open_failure=ConnectError(reason)).run()


async def test_dynamo_fails(aio_loop: object) -> None:
    """If Dynamo cannot register, the worker closes the engine and fails with Dynamo's reason."""
    world = World(dynamo=FakeDynamo(failure=RuntimeError("Unavailable: fetch 'model-source'")))
    assert (1, ["Dynamo's runtime failed: Unavailable: fetch 'model-source'"]) == await world.run()


async def test_dynamo_ends_by_itself(aio_loop: object) -> None:
    """A runtime that ends though nobody asked is a failure, so that a supervisor restarts the worker."""
    assert (1, ["Dynamo's runtime failed: it ended without being asked to"]) == await World().run()


@pytest.mark.rule("R5.11")
async def test_started_twice(aio_loop: object) -> None:
    """A second start is refused."""
    errors = []

    async def aio_serve(engine: EngineObject) -> None:
        try:
            await engine.start(8)
        except FakeDynamoError as error:
            errors.append(error)
        await aio_stop(engine)

    assert (0, []) == await World(dynamo=FakeDynamo(aio_serve)).run()
    assert [ERRORS[ErrorKind.ENGINE_SHUTDOWN]] == [type(error) for error in errors]
    assert "already started" in str(errors[0])


@pytest.mark.rule("R11.1")
async def test_cleanup_is_idempotent(aio_loop: object) -> None:
    """Cleanup may be called twice."""

    async def aio_serve(engine: EngineObject) -> None:
        await aio_stop(engine)
        await engine.cleanup()
        await engine.cleanup()

    assert (0, []) == await World(dynamo=FakeDynamo(aio_serve)).run()


@attrs.define(eq=False)
class NeedsEtcd(FakeDynamo):
    """A runtime that waits for etcd."""

    @property
    def binding(self) -> Binding:
        """It, as the worker sees it."""
        return attrs.evolve(super().binding, waits_for_etcd=True)


@pytest.mark.rule("R2.18", "R11.12")
async def test_role_that_the_engine_cannot_play(aio_loop: object) -> None:
    """An encode worker before a text engine is a wrong setting, for the command line to tell; nothing is registered."""
    world = World(dynamo=NeedsEtcd())  # which is not there, and is not waited for
    words = "--disaggregation-mode: encode requires a multimodal engine; 'served-model' is not one"
    with pytest.raises(InvalidConfig, match=words):
        await world.run(disaggregation_mode=DisaggregationMode.ENCODE)
    assert [True] == world.opened
    assert world.dynamo.engine is None


async def test_without_dynamo(aio_loop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the worker says which one to install."""
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.delitem(sys.modules, "dynamo._core", raising=False)
    settings = WorkerSettings(transport=TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1")))
    with pytest.raises(MissingExtra, match=r"pip install 'trio-sidecar\[dynamo\]'"):
        await run_worker(settings)


@pytest.mark.parametrize(
    ("backend", "variable", "code"),
    [(None, None, 1), ("etcd", None, 1), ("file", None, 0), (None, "file", 0), (None, "etcd", 1), ("file", "etcd", 0)],
)
async def test_waits_for_etcd_where_that_is_the_discovery(
    aio_loop: object, monkeypatch: pytest.MonkeyPatch, backend: str | None, variable: str | None, code: int
) -> None:
    """Dynamo's runtime would wait in silence and deaf to signals; so the worker waits before, and says so."""
    monkeypatch.delenv("DYN_DISCOVERY_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("DYN_DISCOVERY_BACKEND", variable)
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "0.1")
    world = World(dynamo=NeedsEtcd(aio_stop))
    got, reasons = await world.run(discovery_backend=backend)
    assert (code, bool(code)) == (got, "etcd at http://127.0.0.1:1 accepted no connection" in "".join(reasons))
    assert (code == 1) == (world.dynamo.engine is None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            {
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "2.5",
                "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "21",
                "DYN_LOG": "warn",
                "DYN_SELF_HOST_METADATA": "0",
            },
        ),
        (
            {"DYN_LOG": "debug", "DYN_SYSTEM_PORT": "0", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "11"},
            {
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "2.5",
                "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "21",
                "DYN_LOG": "debug",
                "DYN_SYSTEM_PORT": "0",
                "DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready",
            },
        ),
    ],
)
def test_runtime_environment(given: dict[str, str], expected: dict[str, str]) -> None:
    """Dynamo is told our grace and a watchdog that is longer than our drain; what the user set for it stays."""
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"))
    settings = WorkerSettings(transport=transport, withdraw_grace_secs=2.5, drain_secs=10.5)
    environment = dict(given)
    configure_runtime(settings, environment)
    assert expected == environment


def watchdog_of(mode: DisaggregationMode, **environment: str) -> str:
    """What Dynamo is told of a worker's watchdog."""
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"))
    configure_runtime(WorkerSettings(transport=transport, drain_secs=20, disaggregation_mode=mode), environment)
    return environment["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"]


@pytest.mark.rule("R11.14")
@pytest.mark.parametrize("mode", list(DisaggregationMode), ids=lambda mode: mode.value)
def test_watchdog_of_a_prefill_worker(mode: DisaggregationMode) -> None:
    """Dynamo's wait for a prefill engine comes before our drain, so the watchdog must leave time for both."""
    prefill = mode is DisaggregationMode.PREFILL
    assert ("40" if prefill else "30") == watchdog_of(mode)
    assert ("93" if prefill else "30") == watchdog_of(mode, DYN_PREFILL_DRAIN_TIMEOUT_S="62.5")
    assert "30" == watchdog_of(mode, DYN_PREFILL_DRAIN_TIMEOUT_S="0")


@pytest.mark.parametrize("text", ["soon", "-1", "inf", ""])
def test_bad_wait_for_a_prefill_engine(text: str) -> None:
    """Dynamo would take its default for a wait that makes no sense; we say what is wrong."""
    with pytest.raises(InvalidConfig, match="DYN_PREFILL_DRAIN_TIMEOUT_S"):
        watchdog_of(DisaggregationMode.PREFILL, DYN_PREFILL_DRAIN_TIMEOUT_S=text)
