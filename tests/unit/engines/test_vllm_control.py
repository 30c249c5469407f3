"""Control calls over a stand-in for vLLM, and its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest

from support.vllm_fakes import FakeRequests, facts
from trio_sidecar import wire
from trio_sidecar.bridge import AioEvent, AioTaskGroup, aio_checkpoint, run_aio
from trio_sidecar.engines.vllm_control import VllmControl
from trio_sidecar.engines.vllm_lora import PREFIXES_VARIABLE, LoraRegistry, local_path
from trio_sidecar.errors import RpcError, StatusCode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    import betterproto2

    from trio_sidecar.engines.vllm_facts import VllmFacts


class Llm:
    """Writes down what it is asked for; answers as told, and waits where told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.gates: dict[str, AioEvent] = {}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Any coroutine function."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name in self.gates:
                await self.gates[name].aio_wait()
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def get_kv_event_sources(self) -> dict[int, Any]:
        """As told."""
        return dict(self.answers.get("kv", {}))


@attrs.define(eq=False)
class Target:
    """The engine around the calls."""

    facts: VllmFacts = attrs.field(
        factory=lambda: facts(supports_lora=True, sleep_mode=True, weight_transfer="nccl", draft_updates=True)
    )
    llm: Llm = attrs.field(factory=Llm)
    requests: FakeRequests = attrs.field(factory=FakeRequests)
    aborted: list[str] = attrs.field(factory=list)
    stops: int = 0
    loads: bool | Exception = True
    loras: LoraRegistry = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """A registry of its own."""
        self.loras = LoraRegistry(self, self.facts.served_names)

    async def aio_guarded(self, aio_fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """No death here."""
        return await aio_fn(*args)

    async def aio_abort(self, request_ids: Sequence[str]) -> None:
        """Written down."""
        self.aborted += request_ids

    def shut_down(self) -> None:
        """Counted."""
        self.stops += 1

    async def aio_add_lora(self, adapter: wire.LoraAdapter) -> bool:
        """As told."""
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads

    aio_remove_lora = aio_add_lora


@pytest.fixture
def target() -> Target:
    """An engine that can do everything."""
    return Target()


async def ask(target: Target, *requests: betterproto2.Message) -> Any:
    """The answer to the last of some requests."""

    async def aio_main() -> Any:
        control = VllmControl(target)
        return [await control.aio_call(type(request).__name__, request) for request in requests][-1]

    return await run_aio(aio_main)


async def refused(target: Target, request: betterproto2.Message, status: StatusCode, words: str | None = None) -> None:
    """The request is refused with that status."""
    with pytest.raises(RpcError, match=words) as caught:
        await ask(target, request)
    assert status == caught.value.status


LIFECYCLE = [
    (wire.PauseGenerationRequest(), "pause_generation", (), {"mode": "abort", "clear_cache": True}),
    (wire.PauseGenerationRequest(mode=wire.PauseMode.KEEP, clear_cache=False), "pause_generation", (), {
        "mode": "keep", "clear_cache": False
    }),
    (wire.ResumeGenerationRequest(), "resume_generation", (), {}),
    (wire.SleepRequest(), "sleep", (1, "abort"), {}),
    (wire.SleepRequest(level=0, mode=wire.PauseMode.WAIT), "sleep", (0, "wait"), {}),
    (wire.WakeUpRequest(), "wake_up", (None,), {}),
    (wire.WakeUpRequest(tags=["weights"]), "wake_up", (["weights"],), {}),
    (wire.InitWeightTransferEngineRequest(init_info_json=b'{"a": 1}'), "init_weight_transfer_engine", ({"a": 1},), {}),
    (wire.StartWeightUpdateRequest(), "start_weight_update", (), {}),
    (wire.StartDraftWeightUpdateRequest(), "start_draft_weight_update", (), {}),
    (wire.UpdateWeightsRequest(update_info_json=b"{}"), "update_weights", ({},), {}),
    (wire.FinishWeightUpdateRequest(), "finish_weight_update", (None,), {}),
    (wire.FinishWeightUpdateRequest(weight_version="7"), "finish_weight_update", ("7",), {}),
    (wire.UpdateWeightVersionRequest(weight_version="8"), "update_weight_version", ("8",), {}),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "name", "args", "kwargs"), LIFECYCLE, ids=lambda value: str(value)[:50])
async def test_each_call_reaches_vllm(
    target: Target,
    aio_loop: asyncio.AbstractEventLoop,
    request_: betterproto2.Message,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """With the defaults of the contract, and nothing else is called."""
    await ask(target, request_)
    assert [(name, args, kwargs)] == target.llm.calls


async def test_questions(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """Their answers are passed on."""
    target.llm.answers = {"is_paused": True, "is_sleeping": True, "get_weight_version": "v1"}
    assert wire.IsPausedResponse(paused=True) == await ask(target, wire.IsPausedRequest())
    assert wire.IsSleepingResponse(sleeping=True) == await ask(target, wire.IsSleepingRequest())
    assert wire.GetWeightVersionResponse(weight_version="v1") == await ask(target, wire.GetWeightVersionRequest())


REFUSALS = [
    (wire.PauseGenerationRequest(mode=cast("wire.PauseMode", 9)), StatusCode.INVALID_ARGUMENT, "mode 9"),
    (wire.InitWeightTransferEngineRequest(), StatusCode.INVALID_ARGUMENT, "not JSON"),
    (wire.UpdateWeightsRequest(update_info_json=b"[]"), StatusCode.INVALID_ARGUMENT, "not a JSON object"),
    (wire.FinishWeightUpdateRequest(weight_version=" "), StatusCode.INVALID_ARGUMENT, "blank"),
    (wire.UpdateWeightVersionRequest(), StatusCode.INVALID_ARGUMENT, "blank"),
    (wire.LoadLoraRequest(lora_name=" ", source_path="a/b"), StatusCode.INVALID_ARGUMENT, "lora_name is blank"),
    (wire.LoadLoraRequest(lora_name="a"), StatusCode.INVALID_ARGUMENT, "source_path is blank"),
    (wire.LoadLoraRequest(lora_name="tiny", source_path="a/b"), StatusCode.ALREADY_EXISTS, "base model"),
    (wire.UnloadLoraRequest(), StatusCode.INVALID_ARGUMENT, "blank"),
    (wire.UnloadLoraRequest(lora_name="a"), StatusCode.NOT_FOUND, "not loaded"),
]


@pytest.mark.parametrize(("request_", "status", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
async def test_refusals(
    target: Target, aio_loop: asyncio.AbstractEventLoop, request_: betterproto2.Message, status: StatusCode, words: str
) -> None:
    """Each with its status, and vLLM is not asked."""
    await refused(target, request_, status, words)
    assert [] == target.llm.calls


NEEDS = [
    wire.SleepRequest(),
    wire.WakeUpRequest(),
    wire.InitWeightTransferEngineRequest(),
    wire.StartWeightUpdateRequest(),
    wire.UpdateWeightsRequest(),
    wire.FinishWeightUpdateRequest(weight_version=""),
    wire.LoadLoraRequest(),
    wire.UnloadLoraRequest(lora_name="a"),
    wire.ListLorasRequest(),
]


@pytest.mark.parametrize("request_", NEEDS, ids=lambda request: type(request).__name__)
async def test_a_missing_capability_comes_first(
    aio_loop: asyncio.AbstractEventLoop, request_: betterproto2.Message
) -> None:
    """An engine that runs without it refuses before it looks at the arguments."""
    await refused(Target(facts=facts()), request_, StatusCode.FAILED_PRECONDITION)


async def test_draft_updates_are_a_capability_of_their_own(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Weight transfer alone is not enough."""
    target = Target(facts=facts(weight_transfer="nccl"))
    await refused(target, wire.StartDraftWeightUpdateRequest(), StatusCode.FAILED_PRECONDITION, "draft")


async def test_a_failure_of_the_engine_names_the_call(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """It is INTERNAL, whatever kind it is of."""
    target.llm.answers["pause_generation"] = ValueError("no")
    await refused(target, wire.PauseGenerationRequest(), StatusCode.INTERNAL, "PauseGenerationRequest failed: no")


async def test_changes_wait_for_one_another_and_questions_do_not(
    target: Target, aio_loop: asyncio.AbstractEventLoop
) -> None:
    """A pause that waits for its requests holds up a resume, but not somebody who asks whether it is paused."""

    async def aio_main() -> None:
        target.llm.gates["pause_generation"] = AioEvent()
        control = VllmControl(target)
        async with AioTaskGroup() as group:
            group.create_task(control.aio_call("PauseGeneration", wire.PauseGenerationRequest()))
            group.create_task(control.aio_call("ResumeGeneration", wire.ResumeGenerationRequest()))
            for _ in range(5):
                await aio_checkpoint()
            await control.aio_call("IsPaused", wire.IsPausedRequest())
            assert ["pause_generation", "is_paused"] == [name for name, _, _ in target.llm.calls]
            target.llm.gates["pause_generation"].set()
        assert "resume_generation" == target.llm.calls[-1][0]

    await run_aio(aio_main)


async def test_the_life_of_an_adapter(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """Ids count up and are never used again, also not those of failed loads; the list is sorted by name."""
    loaded = await ask(target, wire.LoadLoraRequest(lora_name="zebra", source_path="org/zebra"))
    assert wire.LoraAdapter(lora_id=1, lora_name="zebra", source_path="org/zebra") == loaded.adapter
    await refused(
        target, wire.LoadLoraRequest(lora_name="zebra", source_path="org/other"), StatusCode.ALREADY_EXISTS, "already"
    )
    target.loads = RuntimeError("no such adapter")
    await refused(
        target, wire.LoadLoraRequest(lora_name="ant", source_path="org/ant"), StatusCode.INTERNAL, "no such adapter"
    )
    target.loads = False
    await refused(target, wire.UnloadLoraRequest(lora_name="zebra"), StatusCode.INTERNAL, "refused")
    target.loads = True
    ant = await ask(target, wire.LoadLoraRequest(lora_name="ant", source_path="org/ant"))
    assert 3 == ant.adapter.lora_id
    assert ["ant", "zebra"] == [each.lora_name for each in (await ask(target, wire.ListLorasRequest())).adapters]
    assert 1 == (await ask(target, wire.UnloadLoraRequest(lora_name="zebra"))).adapter.lora_id
    assert ant.adapter == target.loras.find("ant")
    assert None is target.loras.find("zebra")


@pytest.mark.parametrize("path", ["/x", "~/x", "./x", "a/../b", "tests"])
def test_local_paths_need_permission(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks local, or exists here, is refused unless a prefix allows it."""
    with pytest.raises(RpcError, match=PREFIXES_VARIABLE):
        local_path(path, None)
    assert "org/adapter" == local_path("org/adapter", None)


def test_local_paths_within_a_prefix(tmp_path: Path) -> None:
    """Links are resolved before the comparison; a path must be absolute and exist, a prefix too."""
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "adapter").mkdir(parents=True)
    other.mkdir()
    (allowed / "link").symlink_to(other)
    assert str(allowed / "adapter") == local_path(str(allowed / "adapter"), str(allowed))
    assert str(other) == local_path(str(allowed / "link"), f"{allowed}:{other}")
    for path, words in ((allowed / "link", "outside"), (allowed / "nothing", "cannot be read"), ("./x", "absolute")):
        with pytest.raises(RpcError, match=words) as caught:
            local_path(str(path), str(allowed))
        assert StatusCode.INVALID_ARGUMENT == caught.value.status
    with pytest.raises(RpcError, match="does not exist") as caught:
        local_path(str(other), str(tmp_path / "missing"))
    assert StatusCode.INTERNAL == caught.value.status


@attrs.define
class KvConfig:
    """vLLM's ``KVEventsConfig``."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10
    hwm: int = 11
    max_queue_size: int = 12
    topic: str = "kv"


async def test_kv_event_sources(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """One per rank that publishes over ZeroMQ, rank 0 included; none is no error."""
    assert [] == (await ask(target, wire.GetKvEventSourcesRequest())).sources
    target.llm.answers["kv"] = {0: KvConfig(), 1: KvConfig(publisher="null"), 2: KvConfig(enable_kv_cache_events=False)}
    (source,) = (await ask(target, wire.GetKvEventSourcesRequest())).sources
    expected = wire.KvEventSource(
        transport="zmq",
        endpoint="tcp://*:5557",
        topic="kv",
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10,
        hwm=11,
        max_queue_size=12,
    )
    assert expected == source


async def test_abort_and_shutdown(target: Target, aio_loop: asyncio.AbstractEventLoop) -> None:
    """They are the engine's to do."""
    await ask(target, wire.AbortRequest(request_ids=["a", "b"]), wire.ShutdownRequest())
    assert (["a", "b"], 1) == (target.aborted, target.stops)
