"""vLLM's gRPC contract: messages generated from ``protos/``, call descriptors, and the codec of the hot path."""

from trio_sidecar.wire._generated.google.protobuf import ListValue, NullValue, Struct, Value
from trio_sidecar.wire._generated.grpc.health.v1 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
)
from trio_sidecar.wire._generated.vllm import *  # noqa: F403
from trio_sidecar.wire._generated.vllm import __all__ as _vllm_all

__all__ = [  # noqa: PLE0604
    "HealthCheckRequest",
    "HealthCheckResponse",
    "HealthCheckResponseServingStatus",
    "ListValue",
    "NullValue",
    "Struct",
    "Value",
    *_vllm_all,
]
