"""Controls, updates, adapters and KV events as Dynamo's runtime asks for them (spec 12, 13, 14)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import structlog
import trio
from structlog.testing import capture_logs

from support.fake_dynamo import ERRORS, FakeDynamo
from support.lora import BASE_NAMES, LoraEngine, lora
from trio_sidecar import wire
from trio_sidecar.bridge import AioEvent, aio_checkpoint, run_aio
from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import (
    EngineShutdown,
    ErrorKind,
    IncompatibleEngine,
    InvalidConfig,
    InvalidRequest,
    RpcError,
    StatusCode,
)
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import FakeEngine
from trio_sidecar.worker.engine_object import EngineObject
from trio_sidecar.worker.management import Management

if TYPE_CHECKING:
    import asyncio

EVERYTHING = wire.RlCapabilities(
    weight_transfer_enabled=True, sleep_mode_enabled=True, draft_weight_updates_enabled=True
)
CONTROLS = [
    "pause_generation",
    "resume_generation",
    "is_paused",
    "is_sleeping",
    "get_weight_version",
    "sleep",
    "wake_up",
]
LORA_UPDATES = ["load_lora", "unload_lora", "list_loras"]
RL_UPDATES = [
    "update_weight_version",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "start_draft_weight_update",
]


def model(rl: wire.RlCapabilities | None = EVERYTHING, ranks: int = 1, **server: Any) -> DiscoveredModel:
    parallelism = wire.ParallelismInfo(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=ranks,
        data_parallel_size_local=ranks,
        world_size=1,
    )
    return DiscoveredModel.from_messages(
        wire.ModelInfo(
            model_id="model-source",
            served_model_name="served-model",
            served_model_aliases=["model-alias"],
            supports_token_ids_input=True,
            supports_lora=True,
            supports_multimodal=True,
        ),
        wire.ServerInfo(
            api_version="vllm",
            max_loras=4,
            rl_capabilities=rl,
            parallelism=parallelism,
            **{"kv_block_size": 16, "instance_id": "one", **server},
        ),
    )


@attrs.define(eq=False)
class FakeEndpoint:
    """The worker's endpoint: counts registrations."""

    registered: int = 0
    withdrawn: int = 0
    refuses: bool = False

    async def register_endpoint_instance(self) -> None:
        await aio_checkpoint()
        if self.refuses:
            reason = "no"
            raise RuntimeError(reason)
        self.registered += 1

    async def unregister_endpoint_instance(self) -> None:
        await aio_checkpoint()
        if self.refuses:
            reason = "no"
            raise RuntimeError(reason)
        self.withdrawn += 1


MODEL_INPUT = SimpleNamespace(Tokens=1)
MODEL_TYPE = SimpleNamespace(Chat=1, Completions=2, Empty=0, Prefill=4)
WORKER_TYPE = SimpleNamespace(Aggregated=1, Prefill=2, Decode=3, Encode=4)


@attrs.define(eq=False)
class FakeRegistry:
    """``dynamo.llm``: keeps adapters by name."""

    adapters: dict[str, Any] = attrs.field(factory=dict)
    ModelInput: Any = MODEL_INPUT
    ModelType: Any = MODEL_TYPE
    WorkerType: Any = WORKER_TYPE
    ModelRuntimeConfig: Any = SimpleNamespace
    stuck: bool = False

    async def register_model(self, *_: Any, lora_name: str, **keywords: Any) -> None:
        await aio_checkpoint()
        self.adapters[lora_name] = keywords

    async def unregister_model(self, _: Any, lora_name: str) -> None:
        await aio_checkpoint()
        if self.stuck:
            await AioEvent().aio_wait()
        del self.adapters[lora_name]


@attrs.define(eq=False)
class FakePublisher:
    """``dynamo.llm.KvEventPublisher``: remembers what it was made with, and whether it runs."""

    endpoint: Any
    kv_block_size: int
    dp_rank: int
    enable_local_indexer: bool
    zmq_endpoint: str
    zmq_topic: str
    running: bool = True

    def shutdown(self) -> None:
        self.running = False

    @property
    def source(self) -> tuple[str, str, int]:
        return self.zmq_endpoint, self.zmq_topic, self.dp_rank


@attrs.define(eq=False)
class Scene:
    """A worker's management, its engine, and Dynamo's side."""

    settings: WorkerSettings
    found: DiscoveredModel
    engine: FakeEngine
    registry: FakeRegistry = attrs.field(factory=FakeRegistry)
    endpoint: FakeEndpoint = attrs.field(factory=FakeEndpoint)
    publishers: list[FakePublisher] = attrs.field(factory=list)
    management: Management = attrs.field(init=False)
    object: EngineObject = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make the worker's side."""
        binding = attrs.evolve(FakeDynamo().binding, llm=self.registry, kv_event_publisher=self.publish)
        self.management = Management(binding, self.settings, self.found)
        sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
        life = SimpleNamespace(aio_stop=aio_checkpoint)
        self.object = EngineObject(binding, life, sessions, management=self.management)

    def publish(self, *positional: Any, **keywords: Any) -> FakePublisher:
        """Make a publisher."""
        self.publishers.append(FakePublisher(*positional, **keywords))
        return self.publishers[-1]

    def followed(self) -> list[tuple[str, str, int]]:
        """The sources whose events are published now."""
        return [publisher.source for publisher in self.publishers if publisher.running]

    async def start(self) -> None:
        """Up to where Dynamo asks for names, in its order."""
        self.management.attach(self.engine, self.found)
        if "GetKvEventSources" in self.engine.answers:
            assert [] == await run_aio(self.object.kv_event_sources)
        await run_aio(self.object.on_endpoint_ready, self.endpoint)

    async def replace(self, now: DiscoveredModel, *, replaced: bool = True) -> None:
        """The engine goes away and comes back."""
        await run_aio(self.management.aio_withdraw_for_recovery)
        await run_aio(partial(self.management.aio_return_from_recovery, now, replaced=replaced))


def scene(engine: FakeEngine | None = None, found: DiscoveredModel | None = None, **settings: Any) -> Scene:
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("10.0.0.7:50051"))
    worker = WorkerSettings(transport=transport, **{"lora_enabled": True, **settings})
    return Scene(worker, found or model(), engine or LoraEngine())


# -- Names


@pytest.mark.rule("R12.4", "R13.12")
def test_names_are_those_of_the_engine() -> None:
    """Updates of adapters come before those of RL."""
    here = scene()
    assert CONTROLS == here.object.supported_controls()
    assert LORA_UPDATES + RL_UPDATES == here.object.supported_updates()


@pytest.mark.rule("R13.13")
def test_switching_adapters_off_leaves_rl_alone() -> None:
    """The capacity is still registered."""
    here = scene(lora_enabled=False)
    assert RL_UPDATES == here.object.supported_updates()
    assert 4 == here.found.registration().max_gpu_lora_count


def test_an_engine_without_rl_offers_adapters_only() -> None:
    """No capabilities, no controls."""
    here = scene(found=model(rl=None))
    assert ([], LORA_UPDATES) == (here.object.supported_controls(), here.object.supported_updates())


@pytest.mark.rule("R12.2", "R13.12")
async def test_names_that_are_not_offered_get_envelopes(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Before the start too, and without an engine."""
    here = scene(found=model(rl=None), lora_enabled=False)
    for name in ("sleep", "anything"):
        answer = await run_aio(here.object.engine_control, name, {})
        assert {"status": "error", "message": f"unsupported engine control: {name}"} == answer
    for name in ("load_lora", "update_weights"):
        answer = await run_aio(here.object.engine_update, name, {})
        assert {"status": "error", "message": f"unsupported engine update: {name}"} == answer
    bare = EngineObject(FakeDynamo().binding, None, None)  # type: ignore[arg-type]
    assert ([], []) == (bare.supported_controls(), bare.supported_updates())
    assert "error" == (await run_aio(bare.engine_control, "sleep", {}))["status"]
    assert "error" == (await run_aio(bare.engine_update, "load_lora", {}))["status"]


# -- Controls


async def test_a_control_reaches_the_engine(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Its answer comes back."""
    here = scene(FakeEngine(answers={"PauseGeneration": wire.PauseGenerationResponse()}))
    await here.start()
    assert {"status": "paused"} == await run_aio(here.object.engine_control, "pause_generation", {"mode": "wait"})
    assert (1, 0) == (len(here.engine.calls), here.endpoint.registered)


@pytest.mark.rule("R12.6")
@pytest.mark.parametrize(
    ("name", "body", "registered"),
    [
        ("pause_generation", {"mode": "stop"}, 1),
        ("sleep", {"level": 3}, 1),
        ("wake_up", {"tags": 1}, 0),
        ("is_paused", [], 0),
    ],
)
async def test_a_bad_body_gets_an_envelope(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: object, registered: int
) -> None:
    """No engine is asked; where Dynamo has withdrawn the worker for the call, the worker comes back."""
    here = scene(FakeEngine())
    await here.start()
    answer = await run_aio(here.object.engine_control, name, body)
    assert ("error", [], registered) == (answer["status"], here.engine.calls, here.endpoint.registered)
    assert str(answer["message"]).startswith("InvalidRequest: ")


@pytest.mark.rule("R12.7")
async def test_a_control_that_fails_raises_what_dynamo_understands(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The worker stays withdrawn, because nobody knows what state the engine is in."""
    here = scene(FakeEngine(answers={"Sleep": RpcError(StatusCode.UNAVAILABLE, "injected")}))
    await here.start()
    with pytest.raises(ERRORS[ErrorKind.CANNOT_CONNECT], match="Sleep: injected"):
        await run_aio(here.object.engine_control, "sleep", {})
    assert 0 == here.endpoint.registered


# -- Updates


@pytest.mark.rule("R13.28", "R13.29", "R11.5")
async def test_resident_adapters_are_published_before_requests_come(aio_loop: asyncio.AbstractEventLoop) -> None:
    """When Dynamo asks for the last thing before it registers the instance; and withdrawn at the clean-up."""
    engine = LoraEngine()
    engine.hold(lora("adapter-a", 3))
    here = scene(engine)
    await here.start()
    assert {} == here.registry.adapters
    assert None is await run_aio(here.object.health_check_payload)
    assert {"lora_adapter": True, "lora_id": 3} == here.registry.adapters["adapter-a"]["user_data"]
    answer = await run_aio(here.object.engine_update, "list_loras", {})
    assert {"status": "success", "count": 1, "loras": {"adapter-a": 3}} == answer
    await run_aio(here.object.cleanup)
    assert ({}, ["adapter-a"]) == (here.registry.adapters, list(engine.adapters))


@pytest.mark.rule("R13.31")
async def test_an_engine_that_does_not_list_its_adapters_serves_all_the_same(
    aio_loop: asyncio.AbstractEventLoop,
) -> None:
    """The base model is not held up."""
    engine = LoraEngine()
    engine.faults["ListLoras"] = [RpcError(StatusCode.UNAVAILABLE, "injected")]
    here = scene(engine)
    await here.start()
    assert None is await run_aio(here.object.health_check_payload)


@pytest.mark.rule("R11.5")
async def test_a_discovery_that_hangs_does_not_hold_up_the_end(
    aio_loop: asyncio.AbstractEventLoop, autojump_clock: object
) -> None:
    """Records have five seconds to go."""
    engine = LoraEngine()
    engine.hold(lora("adapter-a"))
    here = scene(engine)
    await here.start()
    await run_aio(here.object.health_check_payload)
    here.registry.stuck = True
    with trio.fail_after(5.5):
        await run_aio(here.object.cleanup)


@pytest.mark.rule("R12.7")
async def test_an_rl_update_that_is_refused_raises(aio_loop: asyncio.AbstractEventLoop) -> None:
    """As an invalid argument, which Dynamo answers with its message."""
    here = scene(FakeEngine())
    await here.start()
    with pytest.raises(ERRORS[ErrorKind.INVALID_ARGUMENT], match=r"^new_version must be"):
        await run_aio(here.object.engine_update, "update_weight_version", {})


@pytest.mark.rule("R7.77", "R13.34")
async def test_requests_go_through_the_gate(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine that requests get refuses adapters that are not published."""
    here = scene()
    gate = here.management.attach(here.engine, here.found)

    async def aio_ask() -> None:
        async with gate.aio_generate(wire.GenerateRequest(lora_name="adapter-a"), {}):
            pass

    with pytest.raises(InvalidRequest, match="unknown model"):
        await run_aio(aio_ask)
    assert [] == here.engine.requests
    assert frozenset(BASE_NAMES) == here.found.base_names


async def test_requests_keep_to_the_ranks_of_the_worker(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A worker for a part of the ranks names one in each request; a worker for all leaves the choice to the engine."""

    async def aio_ask(here: Scene) -> None:
        gate = here.management.attach(here.engine, here.found)
        async with gate.aio_generate(wire.GenerateRequest(), {}):
            pass

    ranks = range(1, 3)
    part, whole = scene(found=model(ranks=3).standing_for(ranks), dp_ranks=ranks), scene(found=model(ranks=3))
    for here in (part, whole):
        await run_aio(aio_ask, here)
    assert {"x-data-parallel-rank": "1"} == part.engine.requests[0].metadata
    assert {} == whole.engine.requests[0].metadata


# -- KV events


def source(rank: int) -> wire.KvEventSource:
    return wire.KvEventSource(
        transport="zmq",
        endpoint=f"tcp://*:{5557 + rank}",
        topic="kv",
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=1,
    )


def publishing(*ranks: int) -> FakeEngine:
    answer = wire.GetKvEventSourcesResponse(sources=[source(rank) for rank in ranks])
    return FakeEngine(answers={"GetKvEventSources": answer, "ListLoras": wire.ListLorasResponse()})


@pytest.mark.rule("R14.3", "R14.5", "R14.6")
async def test_each_rank_has_a_source_that_is_published(aio_loop: asyncio.AbstractEventLoop) -> None:
    """By a publisher of the worker's own; Dynamo is given none to follow. At the end nothing is published any more."""
    here = scene(publishing(0, 1), model(ranks=2))
    await here.start()
    assert [("tcp://10.0.0.7:5557", "kv", 0), ("tcp://10.0.0.7:5558", "kv", 1)] == here.followed()
    assert {(here.endpoint, 16, True)} == {
        (publisher.endpoint, publisher.kv_block_size, publisher.enable_local_indexer) for publisher in here.publishers
    }
    await run_aio(here.object.cleanup)
    assert [] == here.followed()


@pytest.mark.rule("R14.3")
async def test_a_part_of_the_ranks_has_its_sources_only(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Workers that share an engine split its sources: no event is credited to two of them."""
    here = scene(publishing(0, 1, 2), model(ranks=3).standing_for(range(1, 3)))
    await here.start()
    assert [1, 2] == [rank for _, _, rank in here.followed()]


@pytest.mark.rule("R14.4")
async def test_a_missing_rank_stops_the_start(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A router that misses a rank's events would be quietly wrong."""
    here = scene(publishing(0), model(ranks=2))
    with pytest.raises(ERRORS[ErrorKind.UNKNOWN], match="data-parallel ranks"):
        await here.start()


@pytest.mark.rule("R14.1")
async def test_encode_workers_have_none(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine is not even asked."""
    here = scene(publishing(0), disaggregation_mode=DisaggregationMode.ENCODE)
    await here.start()
    assert ([], []) == (here.followed(), here.engine.calls)


async def test_before_the_start_nobody_knows(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Asking too early is a state error."""
    with pytest.raises(EngineShutdown, match="not started"):
        await run_aio(scene().management.aio_check_kv_sources)


async def test_without_a_block_size_nothing_is_published(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Routers could not tell which tokens a block holds; the worker serves all the same."""
    here = scene(publishing(0), model(kv_block_size=0))
    with capture_logs() as logs:
        await here.start()
    assert ([], ["kv_events_not_published"]) == (here.followed(), [entry["event"] for entry in logs])


async def test_a_publisher_that_dynamo_cannot_make(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The worker does not start, and says which source it was."""
    here = scene(publishing(0))
    here.management._kv_publishers.binding = attrs.evolve(
        here.management._binding, kv_event_publisher=lambda *_, **__: 1 / 0
    )
    with pytest.raises(
        ERRORS[ErrorKind.ENGINE_SHUTDOWN], match=r"rank 0 at tcp://10\.0\.0\.7:5557 cannot be published"
    ):
        await here.start()


@pytest.mark.rule("R15.6")
async def test_a_replaced_engine_gets_new_publishers(aio_loop: asyncio.AbstractEventLoop) -> None:
    """At its own addresses, and with nothing that the ones before have heard."""
    here = scene(publishing(0))
    await here.start()
    moved = source(0)
    moved.endpoint = "tcp://*:7000"
    here.engine.answers["GetKvEventSources"] = wire.GetKvEventSourcesResponse(sources=[moved])
    await here.replace(model(instance_id="two"))
    assert [False, True] == [publisher.running for publisher in here.publishers]
    assert [("tcp://10.0.0.7:7000", "kv", 0)] == here.followed()
    assert (1, 1) == (here.endpoint.withdrawn, here.endpoint.registered)


@pytest.mark.rule("R15.5")
async def test_the_same_engine_keeps_its_publishers(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It still has the blocks that it had before a connection was lost."""
    here = scene(publishing(0))
    await here.start()
    await here.replace(model(), replaced=False)
    assert [True] == [publisher.running for publisher in here.publishers]


@pytest.mark.rule("R15.6")
@pytest.mark.parametrize(
    ("change", "said"),
    [({"kv_block_size": 32}, "kv_cache_block_size .* 32 instead of 16"), ({"max_model_len": 5}, "context_length .* 5")],
)
async def test_a_replacement_that_the_record_does_not_describe(
    aio_loop: asyncio.AbstractEventLoop, change: dict[str, int], said: str
) -> None:
    """It ends the worker, because the record cannot be written anew; nobody is told of it before."""
    here = scene(publishing(0), model(max_model_len=100))
    await here.start()
    now: dict[str, Any] = {"max_model_len": 100, "instance_id": "two"} | change
    with pytest.raises(IncompatibleEngine, match=said):
        await here.replace(model(**now))
    assert 0 == here.endpoint.registered


@pytest.mark.rule("R15.6", "R6.14")
async def test_a_replacement_of_another_capacity(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An engine measures its memory anew at each start: the worker serves, and adapters' records have the news."""
    engine = publishing(0)
    engine.answers["ListLoras"] = wire.ListLorasResponse(adapters=[lora("adapter-a", 3)])
    here = scene(engine, model(total_kv_blocks=1000))
    await here.start()
    with capture_logs() as logs:
        await here.replace(model(total_kv_blocks=990, instance_id="two"))
    (entry,) = [entry for entry in logs if entry["event"] == "engine_capacity_changed"]
    assert ("1000 -> 990", 1) == (entry["total_kv_blocks"], here.endpoint.registered)
    assert 990 == here.registry.adapters["adapter-a"]["runtime_config"].total_kv_blocks


# -- RL endpoint


@attrs.define(eq=False)
class FakeRuntime:
    """A second runtime with one endpoint."""

    paths: list[str] = attrs.field(factory=list)
    served: AioEvent = attrs.field(factory=AioEvent)
    describe: Any = None
    withdrawn: int = 0
    arguments: tuple[Any, ...] = ()
    system_port: str | None = None

    def open(self, *arguments: Any) -> FakeRuntime:
        import os  # noqa: PLC0415

        self.arguments, self.system_port = arguments[1:], os.environ.get("DYN_SYSTEM_PORT")
        return self

    def endpoint(self, path: str) -> FakeRuntime:
        self.paths.append(path)
        return self

    async def serve_endpoint(self, generator: Any, *, graceful_shutdown: bool) -> None:
        assert graceful_shutdown
        self.describe = generator
        self.served.set()
        await AioEvent().aio_wait()

    async def unregister_endpoint_instance(self) -> None:
        await aio_checkpoint()
        self.withdrawn += 1

    async def register_endpoint_instance(self) -> None:
        await aio_checkpoint()
        self.withdrawn -= 1


@pytest.mark.rule("R6.16")
async def test_trainers_are_told_of_the_worker(
    aio_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --enable-rl there is an endpoint beside the serving one, as long as the worker serves and has its engine."""
    monkeypatch.setenv("DYN_SYSTEM_PORT", "9000")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    here = scene(enable_rl=True)
    runtime = FakeRuntime()
    here.management._binding = attrs.evolve(here.management._binding, open_runtime=runtime.open)
    await here.start()
    async with trio.open_nursery() as nursery:
        here.management.work_in(nursery)
        await run_aio(here.object.health_check_payload)
        await run_aio(runtime.served.aio_wait)
        assert (["dynamo.backend.rl"], ("file", "tcp"), "-1") == (runtime.paths, runtime.arguments, runtime.system_port)

        async def aio_ask() -> Any:
            return [answer async for answer in runtime.describe({"method": "routes"})]

        (answer,) = await run_aio(aio_ask)
        assert (1, {f"control/{name}" for name in CONTROLS}) == (
            answer["world_size"],
            {route for route in answer["routes"] if route.startswith("control/")},
        )
        await run_aio(here.management.aio_withdraw_for_recovery)
        assert 1 == runtime.withdrawn
        await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
        assert 0 == runtime.withdrawn
        await run_aio(here.object.cleanup)
        assert 1 == runtime.withdrawn
        nursery.cancel_scope.cancel()


@pytest.mark.rule("R2.19")
def test_rl_needs_a_system_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot be driven is refused before it registers."""
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)
    with pytest.raises(InvalidConfig, match="DYN_SYSTEM_PORT"):
        scene(enable_rl=True)


# -- Recovery


@pytest.mark.rule("R15.4", "R15.15")
async def test_adapters_go_with_the_engine_and_come_back_before_the_worker_does(
    aio_loop: asyncio.AbstractEventLoop,
) -> None:
    """Away: no record of an adapter, and no instance. Back: records of what the engine has now, then the instance."""
    engine = LoraEngine()
    engine.hold(lora("adapter-a", 3))
    here = scene(engine)
    await here.start()
    await run_aio(here.object.health_check_payload)
    await run_aio(here.management.aio_withdraw_for_recovery)
    assert ({}, 1) == (here.registry.adapters, here.endpoint.withdrawn)
    engine.adapters.clear()
    engine.hold(lora("adapter-b", 4))
    await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert (["adapter-b"], 1) == (list(here.registry.adapters), here.endpoint.registered)


@pytest.mark.rule("R15.15")
async def test_an_engine_that_cannot_list_its_adapters_after_a_recovery_is_fatal(
    aio_loop: asyncio.AbstractEventLoop,
) -> None:
    """Unlike at the start: requests for adapters may be on their way."""
    here = scene(FakeEngine(answers={"ListLoras": RpcError(StatusCode.INTERNAL, "injected")}))
    await here.start()
    await run_aio(here.management.aio_withdraw_for_recovery)
    with pytest.raises(RpcError, match="injected"):
        await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert 0 == here.endpoint.registered


async def test_a_dynamo_that_does_not_listen_during_a_recovery(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Not to be withdrawn costs little, because requests are refused anyway; not to come back ends the worker."""
    here = scene(lora_enabled=False)
    await here.start()
    here.endpoint.refuses = True
    await run_aio(here.management.aio_withdraw_for_recovery)
    with pytest.raises(EngineShutdown, match="could not be registered again: no"):
        await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))


RL_ANSWERS = {
    "PauseGeneration": wire.PauseGenerationResponse(),
    "ResumeGeneration": wire.ResumeGenerationResponse(),
    "IsPaused": wire.IsPausedResponse(paused=False),
    "IsSleeping": wire.IsSleepingResponse(sleeping=False),
}


@pytest.mark.rule("R12.8")
async def test_a_paused_worker_is_still_paused_after_a_recovery(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Dynamo withdrew it before the pause, and only a resume brings it back; a new engine is paused again."""
    here = scene(FakeEngine(answers=dict(RL_ANSWERS)), lora_enabled=False)
    await here.start()
    await run_aio(here.object.engine_control, "pause_generation", {"mode": "keep"})
    await run_aio(here.management.aio_withdraw_for_recovery)
    with structlog.testing.capture_logs() as logs:
        await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert (0, 0) == (here.endpoint.withdrawn, here.endpoint.registered)
    assert ["PauseGeneration", "IsPaused", "PauseGeneration"] == [name for name, _ in here.engine.calls]
    assert ["stays_paused"] == [line["event"] for line in logs]
    await run_aio(here.object.engine_control, "resume_generation", {})
    await run_aio(here.management.aio_withdraw_for_recovery)
    await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert (1, 1) == (here.endpoint.withdrawn, here.endpoint.registered)


@pytest.mark.rule("R12.8")
async def test_a_new_engine_that_cannot_be_paused_gets_no_requests_either(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The worker stays withdrawn, and the log says why the engine is not paused."""
    here = scene(FakeEngine(answers=dict(RL_ANSWERS)), lora_enabled=False)
    await here.start()
    await run_aio(here.object.engine_control, "pause_generation", {})
    await run_aio(here.management.aio_withdraw_for_recovery)
    here.engine.answers["PauseGeneration"] = RpcError(StatusCode.INTERNAL, "injected")
    with structlog.testing.capture_logs() as logs:
        await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert (0, 0) == (here.endpoint.withdrawn, here.endpoint.registered)
    assert [("pause_not_ordered_again", "warning")] == [(line["event"], line["log_level"]) for line in logs]
    assert "PauseGeneration: injected" in logs[0]["reason"]


async def test_a_recovery_before_the_endpoint_is_there(aio_loop: asyncio.AbstractEventLoop) -> None:
    """There is nothing to withdraw and nothing to give back yet."""
    here = scene(lora_enabled=False)
    here.management.attach(here.engine, here.found)
    await run_aio(here.management.aio_withdraw_for_recovery)
    await run_aio(partial(here.management.aio_return_from_recovery, here.found, replaced=False))
    assert (0, 0) == (here.endpoint.withdrawn, here.endpoint.registered)
