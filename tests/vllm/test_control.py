"""Control calls and health of our server over a real vLLM."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from support.plain_vllm_model import CONTEXT
from support.vllm_server import MODEL_NAME, request
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(240)


def test_what_the_engine_is(server: VllmServer) -> None:
    """Names, limits, sizes and capabilities are those of the engine that runs."""
    info = server.call(methods.GET_SERVER_INFO, wire.GetServerInfoRequest())
    assert ("vllm", CONTEXT, 4, 2, True) == (
        info.api_version,
        info.max_model_len,
        info.max_running_requests,
        info.max_loras,
        info.total_kv_blocks > 0,
    )
    assert info.engine_version.startswith("0.3")
    assert info.instance_id
    assert (1, 1, 1, 1) == (
        info.parallelism.tensor_parallel_size,
        info.parallelism.data_parallel_size,
        info.parallelism.data_parallel_size_local,
        info.parallelism.world_size,
    )
    model = server.call(methods.GET_MODEL_INFO, wire.GetModelInfoRequest())
    assert (MODEL_NAME, True, True, True, False) == (
        model.served_model_name,
        model.supports_text_input,
        model.supports_token_ids_input,
        model.supports_lora,
        model.supports_multimodal,
    )
    assert model.model_id.endswith("/model")


@pytest.mark.parametrize("service", ["", "vllm.Inference", "vllm.Control"])
def test_health(server: VllmServer, service: str) -> None:
    """Every service serves; other names are not found."""
    assert wire.HealthCheckResponseServingStatus.SERVING == server.health(service)
    unknown = wire.HealthCheckRequest(service=f"{service}.x")
    assert grpc.StatusCode.NOT_FOUND == server.refusal(methods.HEALTH_CHECK, unknown)


def test_kv_event_sources(server: VllmServer) -> None:
    """What the publisher is configured as."""
    (source,) = server.call(methods.GET_KV_EVENT_SOURCES, wire.GetKvEventSourcesRequest()).sources
    assert ("zmq", "kv", 0, "msgpack", 1) == (
        source.transport,
        source.topic,
        source.data_parallel_rank,
        source.encoding,
        source.schema_version,
    )
    assert source.endpoint.startswith("tcp://127.0.0.1:")


@pytest.fixture
def resumed(server: VllmServer) -> Iterator[VllmServer]:
    """The server, which runs again after the test."""
    yield server
    server.call(methods.RESUME_GENERATION, wire.ResumeGenerationRequest())


@pytest.mark.parametrize("mode", [wire.PauseMode.UNSPECIFIED, wire.PauseMode.KEEP, wire.PauseMode.WAIT])
def test_pause_and_resume(resumed: VllmServer, mode: wire.PauseMode) -> None:
    """ABORT ends what runs, WAIT lets it end, KEEP freezes it; what comes meanwhile waits (0.32) or is refused."""
    # Eight, of which four run at once: some are still there when the pause comes, however slow this client is.
    streams = [
        resumed.stream(request(stopping=wire.StoppingCriteria(max_new_tokens=200, ignore_eos=True))) for _ in range(8)
    ]
    next(streams[0])
    with ThreadPoolExecutor(1) as pool:
        resumed.call(methods.PAUSE_GENERATION, wire.PauseGenerationRequest(mode=mode))
        assert resumed.call(methods.IS_PAUSED, wire.IsPausedRequest()).paused
        late = pool.submit(resumed.generate)
        time.sleep(0.3)
        rejects = not resumed.call(methods.GET_SERVER_INFO, wire.GetServerInfoRequest()).engine_version.startswith(
            "0.32"
        )
        assert (rejects and mode is not wire.PauseMode.KEEP) == late.done()
        resumed.call(methods.RESUME_GENERATION, wire.ResumeGenerationRequest())
        assert not resumed.call(methods.IS_PAUSED, wire.IsPausedRequest()).paused
        ends = [list(stream)[-1].outputs.finish_info for stream in streams]
        if mode is wire.PauseMode.UNSPECIFIED:
            assert wire.FinishInfoFinishReason.ABORTED in [end.finish_reason for end in ends]
        else:
            assert [200] * 8 == [end.num_output_tokens for end in ends]
        if not late.done() or late.exception() is None:
            answer = late.result(60).outputs
            assert answer is not None
            assert 8 == answer.num_tokens


def test_weight_versions(server: VllmServer) -> None:
    """The version begins as ``default`` and is what was last set."""
    ask = wire.GetWeightVersionRequest()
    assert "default" == server.call(methods.GET_WEIGHT_VERSION, ask).weight_version
    for version in ("step-1", "default"):
        server.call(methods.UPDATE_WEIGHT_VERSION, wire.UpdateWeightVersionRequest(weight_version=version))
        assert version == server.call(methods.GET_WEIGHT_VERSION, ask).weight_version


REFUSALS: list[tuple[Any, Any, grpc.StatusCode]] = [
    (
        methods.PAUSE_GENERATION,
        wire.PauseGenerationRequest(mode=cast("wire.PauseMode", 9)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    (methods.SLEEP, wire.SleepRequest(), grpc.StatusCode.FAILED_PRECONDITION),
    (methods.WAKE_UP, wire.WakeUpRequest(), grpc.StatusCode.FAILED_PRECONDITION),
    (methods.START_WEIGHT_UPDATE, wire.StartWeightUpdateRequest(), grpc.StatusCode.FAILED_PRECONDITION),
    (methods.UPDATE_WEIGHTS, wire.UpdateWeightsRequest(), grpc.StatusCode.FAILED_PRECONDITION),
    (methods.UPDATE_WEIGHT_VERSION, wire.UpdateWeightVersionRequest(), grpc.StatusCode.INVALID_ARGUMENT),
]


@pytest.mark.parametrize(("method", "request_", "status"), REFUSALS, ids=[row[0].name for row in REFUSALS])
def test_refusals(server: VllmServer, method: Any, request_: Any, status: grpc.StatusCode) -> None:
    """What this engine cannot do, and what makes no sense."""
    assert status == server.refusal(method, request_)


def test_an_adapter_changes_the_answer(server: VllmServer) -> None:
    """Loaded it is used by name, listed, not loaded twice; unloaded it is unknown; the base model is untouched."""
    base = server.generate()
    load = wire.LoadLoraRequest(lora_name="poet", source_path=str(server.lora))
    adapter = server.call(methods.LOAD_LORA, load).adapter
    assert ("poet", str(server.lora.resolve())) == (adapter.lora_name, adapter.source_path)
    assert adapter.lora_id > 0
    try:
        changed = server.generate(lora_name="poet")
        assert base.outputs is not None
        assert changed.outputs is not None
        assert base.outputs.token_ids != changed.outputs.token_ids
        assert [adapter] == server.call(methods.LIST_LORAS, wire.ListLorasRequest()).adapters
        assert grpc.StatusCode.ALREADY_EXISTS == server.refusal(methods.LOAD_LORA, load)
        assert grpc.StatusCode.NOT_FOUND == server.refusal(methods.GENERATE, request(model="poet"))
    finally:
        assert adapter == server.call(methods.UNLOAD_LORA, wire.UnloadLoraRequest(lora_name="poet")).adapter
    assert [] == server.call(methods.LIST_LORAS, wire.ListLorasRequest()).adapters
    assert grpc.StatusCode.NOT_FOUND == server.refusal(methods.GENERATE, request(lora_name="poet"))
    assert base.outputs == server.generate().outputs


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("", "/x", grpc.StatusCode.INVALID_ARGUMENT),
        ("a", "/etc", grpc.StatusCode.INVALID_ARGUMENT),
        (MODEL_NAME, "org/adapter", grpc.StatusCode.ALREADY_EXISTS),
        ("a", "org/adapter", grpc.StatusCode.INTERNAL),
    ],
)
def test_adapters_that_cannot_be_loaded(server: VllmServer, name: str, path: str, status: grpc.StatusCode) -> None:
    """Blank, not allowed, taken by the base model, not there."""
    load = wire.LoadLoraRequest(lora_name=name, source_path=path)
    assert status == server.refusal(methods.LOAD_LORA, load)
    assert 8 == server.generate().outputs.num_tokens  # type: ignore[union-attr]
