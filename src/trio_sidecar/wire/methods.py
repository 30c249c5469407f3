"""Descriptors of every call of the contract; clients and servers are built from these tables."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs
import betterproto2

from trio_sidecar import wire

__all__ = ["CONTROL_METHODS", "RANK_METADATA_KEY", "Method"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

INFERENCE = "vllm.Inference"
CONTROL = "vllm.Control"
HEALTH = "grpc.health.v1.Health"

RANK_METADATA_KEY = "x-data-parallel-rank"
"""Request metadata that carries the absolute data-parallel rank, ASCII decimal (R7.38)."""


@attrs.frozen(slots=True)
class Method(Generic[Req, Resp]):
    """One call: where it lives, what goes in, what comes out."""

    service: str
    name: str
    request: type[Req]
    response: type[Resp]
    server_streaming: bool = False

    @property
    def path(self) -> str:
        """The HTTP/2 path."""
        return f"/{self.service}/{self.name}"


GENERATE = Method(INFERENCE, "Generate", wire.GenerateRequest, wire.GenerateResponse)
GENERATE_STREAM = Method(
    INFERENCE, "GenerateStream", wire.GenerateRequest, wire.GenerateResponse, server_streaming=True
)
HEALTH_CHECK = Method(HEALTH, "Check", wire.HealthCheckRequest, wire.HealthCheckResponse)
HEALTH_WATCH = Method(HEALTH, "Watch", wire.HealthCheckRequest, wire.HealthCheckResponse, server_streaming=True)

GET_SERVER_INFO = Method(CONTROL, "GetServerInfo", wire.GetServerInfoRequest, wire.ServerInfo)
GET_MODEL_INFO = Method(CONTROL, "GetModelInfo", wire.GetModelInfoRequest, wire.ModelInfo)
ABORT = Method(CONTROL, "Abort", wire.AbortRequest, wire.AbortResponse)
GET_KV_EVENT_SOURCES = Method(
    CONTROL, "GetKvEventSources", wire.GetKvEventSourcesRequest, wire.GetKvEventSourcesResponse
)
PAUSE_GENERATION = Method(CONTROL, "PauseGeneration", wire.PauseGenerationRequest, wire.PauseGenerationResponse)
RESUME_GENERATION = Method(CONTROL, "ResumeGeneration", wire.ResumeGenerationRequest, wire.ResumeGenerationResponse)
IS_PAUSED = Method(CONTROL, "IsPaused", wire.IsPausedRequest, wire.IsPausedResponse)
SLEEP = Method(CONTROL, "Sleep", wire.SleepRequest, wire.SleepResponse)
WAKE_UP = Method(CONTROL, "WakeUp", wire.WakeUpRequest, wire.WakeUpResponse)
IS_SLEEPING = Method(CONTROL, "IsSleeping", wire.IsSleepingRequest, wire.IsSleepingResponse)
INIT_WEIGHT_TRANSFER_ENGINE = Method(
    CONTROL, "InitWeightTransferEngine", wire.InitWeightTransferEngineRequest, wire.InitWeightTransferEngineResponse
)
START_WEIGHT_UPDATE = Method(
    CONTROL, "StartWeightUpdate", wire.StartWeightUpdateRequest, wire.StartWeightUpdateResponse
)
START_DRAFT_WEIGHT_UPDATE = Method(
    CONTROL, "StartDraftWeightUpdate", wire.StartDraftWeightUpdateRequest, wire.StartDraftWeightUpdateResponse
)
UPDATE_WEIGHTS = Method(CONTROL, "UpdateWeights", wire.UpdateWeightsRequest, wire.UpdateWeightsResponse)
FINISH_WEIGHT_UPDATE = Method(
    CONTROL, "FinishWeightUpdate", wire.FinishWeightUpdateRequest, wire.FinishWeightUpdateResponse
)
UPDATE_WEIGHT_VERSION = Method(
    CONTROL, "UpdateWeightVersion", wire.UpdateWeightVersionRequest, wire.UpdateWeightVersionResponse
)
GET_WEIGHT_VERSION = Method(CONTROL, "GetWeightVersion", wire.GetWeightVersionRequest, wire.GetWeightVersionResponse)
LOAD_LORA = Method(CONTROL, "LoadLora", wire.LoadLoraRequest, wire.LoadLoraResponse)
UNLOAD_LORA = Method(CONTROL, "UnloadLora", wire.UnloadLoraRequest, wire.UnloadLoraResponse)
LIST_LORAS = Method(CONTROL, "ListLoras", wire.ListLorasRequest, wire.ListLorasResponse)
SHUTDOWN = Method(CONTROL, "Shutdown", wire.ShutdownRequest, wire.ShutdownResponse)

CONTROL_METHODS: tuple[Method[Any, Any], ...] = (
    GET_SERVER_INFO,
    GET_MODEL_INFO,
    ABORT,
    GET_KV_EVENT_SOURCES,
    PAUSE_GENERATION,
    RESUME_GENERATION,
    IS_PAUSED,
    SLEEP,
    WAKE_UP,
    IS_SLEEPING,
    INIT_WEIGHT_TRANSFER_ENGINE,
    START_WEIGHT_UPDATE,
    START_DRAFT_WEIGHT_UPDATE,
    UPDATE_WEIGHTS,
    FINISH_WEIGHT_UPDATE,
    UPDATE_WEIGHT_VERSION,
    GET_WEIGHT_VERSION,
    LOAD_LORA,
    UNLOAD_LORA,
    LIST_LORAS,
    SHUTDOWN,
)
"""Every unary call of ``vllm.Control``."""
