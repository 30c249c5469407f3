"""A gRPC server that answers health and discovery as a test tells it, and generates nothing."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs
import grpc

from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Iterator

Health = wire.HealthCheckResponseServingStatus


def default_model() -> wire.ModelInfo:
    """A model that a worker accepts."""
    return wire.ModelInfo(
        model_id="fake-model",
        served_model_name="fake",
        supports_text_input=True,
        supports_token_ids_input=True,
    )


def default_server() -> wire.ServerInfo:
    """A server that a worker accepts."""
    return wire.ServerInfo(
        engine_version="0.0",
        api_version="vllm",
        instance_id="fake",
        max_model_len=1024,
        kv_block_size=16,
        total_kv_blocks=64,
        max_running_requests=8,
        max_batched_tokens=512,
    )


@attrs.define
class FakeEngine:
    """The answers; may be changed while it runs.

    Attributes:
        calls: Names of the calls it got, in order.
    """

    port: int = 0
    model: wire.ModelInfo = attrs.field(factory=default_model)
    server: wire.ServerInfo = attrs.field(factory=default_server)
    health: Health = Health.SERVING
    calls: list[str] = attrs.field(factory=list)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def answer(self, method: methods.Method[Any, Any], _request: bytes) -> bytes:
        """One unary answer."""
        self.calls.append(method.name)
        if method is methods.HEALTH_CHECK:
            return bytes(wire.HealthCheckResponse(status=self.health))
        if method is methods.GET_KV_EVENT_SOURCES:
            return bytes(wire.GetKvEventSourcesResponse())
        return bytes(self.model if method is methods.GET_MODEL_INFO else self.server)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Routes the four calls; the rest is UNIMPLEMENTED."""

    def __init__(self, engine: FakeEngine) -> None:
        known = (
            methods.HEALTH_CHECK,
            methods.GET_MODEL_INFO,
            methods.GET_SERVER_INFO,
            methods.GET_KV_EVENT_SOURCES,
        )
        self._routes = {method.path: method for method in known}
        self._engine = engine

    def service(self, details: Any) -> Any:
        """The handler of one call."""
        method = self._routes.get(details.method)
        if method is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: self._engine.answer(method, request))


@contextlib.contextmanager
def fake_engine(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Serve it on a port that the system chooses."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Handlers(engine)])
        engine.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield engine
        finally:
            server.stop(grace=None).wait(5)
