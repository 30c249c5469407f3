"""Health wait and discovery over a fake engine, in virtual time (spec 5 and 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import structlog
import trio

from trio_sidecar import wire
from trio_sidecar.bridge import aio_sleep
from trio_sidecar.deadline import Deadline
from trio_sidecar.discovery import DiscoveredModel, Registration, discover, local_ranks, wait_until_serving
from trio_sidecar.errors import (
    ConnectError,
    ConnectionTimeoutError,
    ErrorKind,
    IncompatibleEngine,
    InvalidConfig,
    RpcError,
    StatusCode,
)
from trio_sidecar.testing.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio.testing import MockClock

Status = wire.HealthCheckResponseServingStatus
CONTROL = "vllm.Control"
INFERENCE = "vllm.Inference"


def model(**changes: Any) -> wire.ModelInfo:
    """The fixture of spec 0.3."""
    fields: dict[str, Any] = {
        "model_id": "model-source",
        "served_model_name": "served-model",
        "served_model_aliases": ["model-alias"],
        "supports_text_input": True,
        "supports_token_ids_input": True,
        "supports_lora": True,
        "reasoning_parser": "deepseek_r1",
        "tool_call_parser": "hermes",
    }
    return wire.ModelInfo(**(fields | changes))


def parallelism(**changes: Any) -> wire.ParallelismInfo:
    """The fixture of spec 0.3."""
    fields = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "world_size": 2,
    }
    return wire.ParallelismInfo(**(fields | changes))


def server(**changes: Any) -> wire.ServerInfo:
    """The fixture of spec 0.3."""
    fields: dict[str, Any] = {
        "engine_version": "test-vllm",
        "api_version": "vllm",
        "instance_id": "test-instance",
        "parallelism": parallelism(),
        "max_model_len": 8192,
        "kv_block_size": 16,
        "total_kv_blocks": 4096,
        "max_running_requests": 128,
        "max_batched_tokens": 2048,
        "max_loras": 4,
        "rl_capabilities": wire.RlCapabilities(
            weight_transfer_enabled=True,
            weight_transfer_backend="nccl",
            sleep_mode_enabled=True,
            draft_weight_updates_enabled=True,
        ),
    }
    return wire.ServerInfo(**(fields | changes))


def found(model_changes: dict[str, Any] | None = None, **server_changes: Any) -> DiscoveredModel:
    return DiscoveredModel.from_messages(model(**(model_changes or {})), server(**server_changes))


# -- Health


@attrs.define
class HealthScript:
    """An engine whose health is scripted: one entry per check, the last one for ever."""

    answers: Sequence[int | Exception]
    asked: list[tuple[str, float]] = attrs.field(factory=list)

    async def aio_check_health(self, service: str) -> Any:
        """The next entry."""
        self.asked.append((service, round(trio.current_time(), 6)))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def wait(script: Any, *services: str, deadline: float = 10, interval: float = 1) -> None:
    await wait_until_serving(script, services or (CONTROL,), Deadline.after(deadline), interval)


@pytest.mark.rule("R5.1", "R5.3", "R5.8")
async def test_services_are_awaited_one_after_another(autojump_clock: MockClock, aio_loop: object) -> None:
    """The second service is asked about only when the first serves; every status but SERVING waits one interval."""
    script = HealthScript([Status.UNKNOWN, Status.NOT_SERVING, Status.SERVICE_UNKNOWN, 42, Status.SERVING])
    start = trio.current_time()
    await wait(script, CONTROL, INFERENCE)
    assert [CONTROL] * 5 + [INFERENCE] == [service for service, _ in script.asked]
    assert pytest.approx(4) == trio.current_time() - start


@pytest.mark.rule("R5.4")
@pytest.mark.parametrize("status", [StatusCode.NOT_FOUND, StatusCode.UNIMPLEMENTED])
async def test_a_peer_without_health_is_not_asked_again(
    autojump_clock: MockClock, aio_loop: object, status: StatusCode
) -> None:
    """A peer that does not know the service or the API fails at once, with both named."""
    script = HealthScript([RpcError(status, "who?")])
    with pytest.raises(IncompatibleEngine, match=r"vllm\.Control.*gRPC health API") as caught:
        await wait(script)
    assert ErrorKind.UNKNOWN is caught.value.kind
    assert 1 == len(script.asked)


@pytest.mark.rule("R5.5")
@pytest.mark.parametrize(
    "error", [RpcError(StatusCode.UNAVAILABLE, "away"), RpcError(StatusCode.INTERNAL, "?"), ConnectError("gone")]
)
async def test_other_failures_are_retried(autojump_clock: MockClock, aio_loop: object, error: Exception) -> None:
    """Any other failure of a check is retried after the interval."""
    script = HealthScript([error, error, Status.SERVING])
    await wait(script)
    assert 3 == len(script.asked)


@pytest.mark.rule("R5.6", "R5.3")
async def test_the_deadline_ends_the_wait(autojump_clock: MockClock, aio_loop: object) -> None:
    """An engine that stays NOT_SERVING fails exactly at the deadline; service, time and last status are named."""
    script = HealthScript([Status.NOT_SERVING])
    start = trio.current_time()
    with pytest.raises(ConnectError) as caught:
        await wait(script, deadline=2.5)
    assert pytest.approx(2.5) == trio.current_time() - start
    for part in (CONTROL, "SERVING", "2.5s", "NOT_SERVING"):
        assert part in str(caught.value)
    assert ErrorKind.CANNOT_CONNECT is caught.value.kind
    assert 3 == len(script.asked)


@pytest.mark.rule("R5.2", "FR-028")
async def test_a_check_that_hangs_is_cut_by_the_deadline(autojump_clock: MockClock, aio_loop: object) -> None:
    """A check is bounded by what is left of the deadline, not by itself."""

    class Hanging:
        async def aio_check_health(self, service: str) -> Any:
            await aio_sleep(3600)

    start = trio.current_time()
    with pytest.raises(ConnectError, match="none reported"):
        await wait(Hanging(), deadline=7)
    assert pytest.approx(7) == trio.current_time() - start


@pytest.mark.rule("R5.6")
async def test_the_last_refusal_is_remembered(autojump_clock: MockClock, aio_loop: object) -> None:
    """If checks fail instead of answering, the last failure is what the error tells."""
    script = HealthScript([Status.NOT_SERVING, RpcError(StatusCode.UNAVAILABLE, "engine core died")])
    with pytest.raises(ConnectError, match="engine core died"):
        await wait(script, deadline=3)


@pytest.mark.rule("FR-033")
async def test_the_wait_shows_its_progress(autojump_clock: MockClock, aio_loop: object) -> None:
    """A line every ten seconds, and for every new status, tells what is waited for and how long it may take."""
    script = HealthScript([Status.UNKNOWN] * 12 + [Status.NOT_SERVING] * 3 + [Status.SERVING])
    with structlog.testing.capture_logs() as logs:
        await wait(script, deadline=60)
    lines = [line for line in logs if line["event"] == "waiting_for_engine"]
    assert [("UNKNOWN", 60), ("UNKNOWN", 50), ("NOT_SERVING", 48)] == [
        (line["last_status"], line["remaining_secs"]) for line in lines
    ]


# -- Discovery


@pytest.mark.rule("R5.9")
async def test_discovery_asks_for_model_then_server(aio_loop: object) -> None:
    """Both descriptions are fetched, in this order, and combined."""
    engine = FakeEngine(answers={"GetModelInfo": model(), "GetServerInfo": server()})
    discovered = await discover(engine, Deadline.after(10))
    assert [
        ("GetModelInfo", wire.GetModelInfoRequest()),
        ("GetServerInfo", wire.GetServerInfoRequest()),
    ] == engine.calls
    assert "served-model" == discovered.served_model_name
    assert ("test-vllm", "test-instance") == (discovered.engine_version, discovered.instance_id)


@pytest.mark.rule("R5.9")
@pytest.mark.parametrize("name", ["GetModelInfo", "GetServerInfo"])
async def test_discovery_is_bounded(autojump_clock: MockClock, aio_loop: object, name: str) -> None:
    """A call that overruns the deadline fails with a timeout that names the call."""

    class Slow(FakeEngine):
        async def aio_call(self, method: Any, request: Any) -> Any:
            if method.name == name:
                await aio_sleep(3600)
            return await super().aio_call(method, request)

    engine = Slow(answers={"GetModelInfo": model(), "GetServerInfo": server()})
    await trio.sleep(5)  # the time since the call counts, not that since the clock began
    start = trio.current_time()
    with pytest.raises(ConnectionTimeoutError, match=f"{name}: .* startup deadline .3s after the call") as caught:
        await discover(engine, Deadline.after(3))
    assert pytest.approx(3) == trio.current_time() - start
    assert ErrorKind.CONNECTION_TIMEOUT is caught.value.kind


@pytest.mark.parametrize(
    ("model_changes", "server_changes", "said"),
    [
        ({}, {"api_version": "unsupported"}, "vLLM reports API version 'unsupported'; expected 'vllm'"),
        ({"model_id": ""}, {}, "vLLM reports an empty model_id"),
        ({"model_id": " \t"}, {}, "vLLM reports an empty model_id"),
        ({"served_model_name": ""}, {}, "vLLM reports an empty served_model_name"),
        ({"served_model_name": "  "}, {}, "vLLM reports an empty served_model_name"),
        (
            {"supports_token_ids_input": False},
            {},
            "the discovered model does not support token-ID input (supports_token_ids_input)",
        ),
        ({}, {"parallelism": parallelism(data_parallel_size=0)}, "vLLM reports a data-parallel size of zero"),
    ],
)
def test_engines_that_cannot_be_served(
    model_changes: dict[str, Any], server_changes: dict[str, Any], said: str
) -> None:
    """An engine that cannot be served is refused, and the message names what is wrong (spec 6.1)."""
    with pytest.raises(IncompatibleEngine) as caught:
        found(model_changes, **server_changes)
    assert ErrorKind.UNKNOWN is caught.value.kind
    assert said == str(caught.value)


@pytest.mark.rule("R6.1", "R6.2")
@pytest.mark.parametrize(
    ("size", "rank", "local", "ranks"),
    [(2, 0, 0, range(2)), (8, 0, 4, range(4)), (8, 4, 4, range(4, 8)), (1, 0, 1, range(1)), (8, 7, 1, range(7, 8))],
)
def test_valid_local_ranges(size: int, rank: int, local: int, ranks: range) -> None:
    """Start and local size give the absolute ranks behind the endpoint; local 0 with start 0 means the whole group."""
    assert ranks == local_ranks(
        parallelism(data_parallel_size=size, data_parallel_rank=rank, data_parallel_size_local=local)
    )


@pytest.mark.rule("R6.2")
@pytest.mark.parametrize(
    ("size", "rank", "local", "words"),
    [
        (8, 4, 0, "without a local size"),
        (8, 0, 9, "invalid local range"),
        (8, 4, 5, "invalid local range"),
        (2**32 - 1, 2**32 - 2, 4, "invalid local range"),
    ],
)
def test_invalid_local_ranges(size: int, rank: int, local: int, words: str) -> None:
    """A range that does not fit its group is refused, also where 32 bits would overflow."""
    with pytest.raises(IncompatibleEngine, match=words):
        local_ranks(parallelism(data_parallel_size=size, data_parallel_rank=rank, data_parallel_size_local=local))


@pytest.mark.rule("R6.3")
def test_absent_parallelism_is_one_unregistered_rank() -> None:
    """Without parallelism there is rank 0, and Dynamo is told nothing about ranks."""
    discovered = found(parallelism=None)
    assert range(1) == discovered.local_ranks
    registration = discovered.registration()
    assert (None, None) == (registration.data_parallel_size, registration.data_parallel_start_rank)


@pytest.mark.rule("R6.2")
def test_an_assumed_group_is_worth_a_warning() -> None:
    """Assuming that a whole group of more than one rank is local is logged."""
    with structlog.testing.capture_logs() as logs:
        local_ranks(parallelism(data_parallel_size=1))
        assert [] == logs
        local_ranks(parallelism(data_parallel_size=2))
    assert [
        {
            "event": "local_ranks_assumed",
            "log_level": "warning",
            "data_parallel_size": 2,
            "reason": "the engine reports no local size",
        }
    ] == logs


def test_registration_of_the_fixture() -> None:
    """Every field that Dynamo gets, for the fixture (spec 6.2)."""
    assert (
        Registration(
            model="model-source",
            served_model_name="served-model",
            aliases=("model-alias",),
            context_length=8192,
            kv_cache_block_size=16,
            total_kv_blocks=2048,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            max_gpu_lora_count=4,
            data_parallel_size=2,
            data_parallel_start_rank=0,
            runtime_data={"lora_requires_registration": True, "vllm_inference_v1_generate": True},
        )
        == found().registration()
    )


def test_registration_of_a_hybrid_group() -> None:
    """A worker for four of eight ranks registers those four, with their share of the blocks."""
    registration = found(
        parallelism=parallelism(data_parallel_size=8, data_parallel_rank=4, data_parallel_size_local=4)
    ).registration()
    assert (4, 4, 1024) == (
        registration.data_parallel_size,
        registration.data_parallel_start_rank,
        registration.total_kv_blocks,
    )


def test_registration_for_a_part_of_the_ranks() -> None:
    """A worker that stands for some ranks registers those; a rank's share of the blocks stays what it is."""
    group = found(parallelism=parallelism(data_parallel_size=8, data_parallel_rank=4, data_parallel_size_local=4))
    registration = group.standing_for(range(6, 8)).registration()
    assert (2, 6, 1024) == (
        registration.data_parallel_size,
        registration.data_parallel_start_rank,
        registration.total_kv_blocks,
    )
    assert group == group.standing_for(None)
    assert group == group.standing_for(range(4, 8))


@pytest.mark.parametrize("ranks", [range(3, 5), range(7, 9), range(1)])
def test_ranks_elsewhere_are_refused(ranks: range) -> None:
    """A rank that is not behind the endpoint names the flag and what is there."""
    group = found(parallelism=parallelism(data_parallel_size=9, data_parallel_rank=4, data_parallel_size_local=4))
    with pytest.raises(InvalidConfig) as caught:
        group.standing_for(ranks)
    expected = f"--dp-ranks: {ranks.start}-{ranks.stop - 1} is not behind this endpoint; its ranks are 4-7"
    assert expected == str(caught.value)


@pytest.mark.rule("R6.5")
def test_registration_of_a_server_that_reports_nothing() -> None:
    """Zero means unset, everywhere."""
    registration = DiscoveredModel.from_messages(model(), wire.ServerInfo(api_version="vllm")).registration()
    unset = attrs.asdict(registration)
    for name in ("model", "served_model_name", "aliases", "runtime_data"):
        del unset[name]
    assert dict.fromkeys(unset) == unset


@pytest.mark.rule("R6.6")
@pytest.mark.parametrize(
    ("total", "ranks", "per_rank", "warning"),
    [
        (0, 2, None, None),
        (4096, 2, 2048, None),
        (4096, 4, 1024, None),
        (4097, 2, 2048, "kv_blocks_not_divisible"),
        (2, 2, 1, None),
        (1, 2, 1, "fewer_kv_blocks_than_ranks"),
    ],
)
def test_kv_blocks_per_rank(total: int, ranks: int, per_rank: int | None, warning: str | None) -> None:
    """Dynamo counts blocks per rank; what does not divide evenly is rounded down and logged, but never to none."""
    discovered = found(
        total_kv_blocks=total, parallelism=parallelism(data_parallel_size=ranks, data_parallel_size_local=ranks)
    )
    with structlog.testing.capture_logs() as logs:
        assert per_rank == discovered.registration().total_kv_blocks
    line = {"log_level": "warning", "total_kv_blocks": total, "local_ranks": ranks, "published_per_rank": per_rank}
    assert ([] if warning is None else [{"event": warning, **line}]) == logs


@pytest.mark.rule("R6.8")
@pytest.mark.parametrize(
    ("physical", "effective", "dcp", "size"),
    [
        (16, 16, 1, 16),
        (16, 32, 2, 32),
        (16, 64, 2, 64),
        (16, 2**32 - 1, 1, 2**32 - 1),
        (16, None, 1, 16),
        (16, None, 2, 16),
        (0, None, 1, None),
    ],
)
def test_block_size(physical: int, effective: int | None, dcp: int, size: int | None) -> None:
    """The engine's effective size is authoritative; without it the physical one is taken as it is."""
    discovered = found(
        kv_block_size=physical,
        effective_attention_block_size=effective,
        parallelism=parallelism(decode_context_parallel_size=dcp),
    )
    assert size == discovered.registration().kv_cache_block_size


@pytest.mark.rule("R6.7", "R6.8")
@pytest.mark.parametrize(
    ("effective", "words"), [(0, "0; expected a nonzero size"), (2**32, "4294967296; expected one that fits u32")]
)
def test_impossible_block_sizes(effective: int, words: str) -> None:
    """An impossible effective size is refused, unless KV routing is off, where nobody needs it."""
    discovered = found(effective_attention_block_size=effective)
    with pytest.raises(IncompatibleEngine, match=f"^vLLM reports effective_attention_block_size {words}$"):
        discovered.registration()
    registration = discovered.registration(kv_routing=False)
    assert (None, None) == (registration.kv_cache_block_size, registration.total_kv_blocks)


@pytest.mark.rule("R6.9")
def test_base_names() -> None:
    """Model id, served name and aliases mean the base model; nothing else does."""
    assert {"model-source", "served-model", "model-alias"} == found().base_names


@pytest.mark.rule("R6.10")
@pytest.mark.parametrize(("flag", "room", "count"), [(True, 4, 4), (True, 1, 1), (True, 0, None), (False, 4, None)])
def test_lora_needs_flag_and_room(flag: bool, room: int, count: int | None) -> None:
    """Adapters are supported if the model takes them and there is room for one."""
    discovered = found({"supports_lora": flag}, max_loras=room)
    assert (count is not None) == discovered.supports_lora
    assert count == discovered.registration().max_gpu_lora_count


# -- Compatibility


@pytest.mark.rule("R6.11")
@pytest.mark.parametrize(
    "changed",
    [
        lambda: found({"model_id": "x"}),
        lambda: found({"served_model_name": "x"}),
        lambda: found({"served_model_aliases": []}),
        lambda: found({"reasoning_parser": ""}),
        lambda: found({"tool_call_parser": ""}),
        lambda: found({"supports_lora": False}),
        lambda: found(max_loras=5),
        lambda: found({"supports_multimodal": True}),
    ],
)
def test_a_changed_identity_is_refused(changed: Callable[[], DiscoveredModel]) -> None:
    """Requests are converted for one model; another one behind the same endpoint is an error."""
    with pytest.raises(IncompatibleEngine, match="identity changed"):
        found().check_same_engine(changed())


@pytest.mark.rule("R6.12")
@pytest.mark.parametrize(
    "after",
    [
        parallelism(tensor_parallel_size=3),
        parallelism(pipeline_parallel_size=2),
        parallelism(data_parallel_size_local=1),
        None,
    ],
)
def test_a_changed_parallelism_is_refused(after: wire.ParallelismInfo | None) -> None:
    """Any difference in the parallelism message counts."""
    with pytest.raises(IncompatibleEngine, match="parallelism"):
        found().check_same_engine(found(parallelism=after))


@pytest.mark.rule("R6.13")
def test_changed_rl_capabilities_are_refused() -> None:
    """What the engine can do for RL is part of the registration."""
    with pytest.raises(IncompatibleEngine, match="RL capabilities changed"):
        found().check_same_engine(found(rl_capabilities=None))


@pytest.mark.rule("R6.14")
def test_limits_and_versions_may_change() -> None:
    """Version, instance, limits and sizes are not compared."""
    found().check_same_engine(
        found(
            engine_version="next",
            instance_id="other",
            max_model_len=1,
            kv_block_size=32,
            total_kv_blocks=1,
            max_running_requests=1,
            max_batched_tokens=1,
        )
    )
