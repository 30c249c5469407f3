"""A server of the contract that keeps what it is asked and answers from a script; nothing of it is the product's.

It is grpcio over the classes that protoc makes, so that what a worker sends is read by other code than what wrote it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from support.grpc_stubs import stubs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

THREADS = 16
SERVICES = ("", "vllm.Inference", "vllm.Control")
MAX_MESSAGE = 64 << 20


@attrs.frozen(slots=True)
class Reply:
    """What one request is answered.

    Attributes:
        messages: Serialised ``GenerateResponse`` messages, in order.
        failure: Status that ends the stream; None for OK.
        opens: Whether the failure comes after the response headers, and so in the middle of a stream.
    """

    messages: Sequence[bytes] = ()
    failure: tuple[grpc.StatusCode, str] | None = None
    opens: bool = True


@attrs.frozen(slots=True)
class Seen:
    """One request as it came in.

    Attributes:
        message: A google ``GenerateRequest``.
        metadata: Without gRPC's own and the user agent.
    """

    message: Any
    metadata: dict[str, str]


class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """One engine for one worker.

    Attributes:
        replies: By request id; a request without one fails as UNIMPLEMENTED.
        answers: Serialised answers of Control's calls, by method.
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.replies: dict[str, Reply] = {}
        self.answers = answers
        self.port = 0
        self._seen: dict[str, list[Seen]] = {}
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def taken(self, request_id: str) -> list[Seen]:
        """All requests that came under this id, forgotten here."""
        with self._lock:
            return self._seen.pop(request_id, [])

    def service(self, details: Any) -> Any:
        """Find the handler of a call, as grpcio asks for it."""
        service, _, name = details.method.lstrip("/").partition("/")
        if (service, name) == ("vllm.Inference", "GenerateStream"):
            return grpc.unary_stream_rpc_method_handler(self._generate)
        if service == "vllm.Control" and name in self.answers:
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: self.answers[name])
        return None

    def _generate(self, body: bytes, context: Any) -> Iterator[bytes]:
        message = stubs().message("GenerateRequest").FromString(body)
        metadata = {
            key: value for key, value in context.invocation_metadata() if key != "user-agent" and key[:5] != "grpc-"
        }
        with self._lock:
            self._seen.setdefault(message.request_id, []).append(Seen(message, metadata))
        reply = self.replies.get(message.request_id, Reply(failure=(grpc.StatusCode.UNIMPLEMENTED, "no script")))
        if reply.opens:
            context.send_initial_metadata(())
        yield from reply.messages
        if reply.failure is not None:
            context.abort(*reply.failure)


@contextmanager
def recording(answers: dict[str, bytes]) -> Iterator[Recorder]:
    """Run a recorder on a port that the system chooses."""
    recorder = Recorder(answers)
    options = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.so_reuseport", 0)]
    with ThreadPoolExecutor(THREADS) as threads:
        server = grpc.server(threads, handlers=[recorder], options=options)
        status = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        for service in SERVICES:
            status.set(service, health_pb2.HealthCheckResponse.SERVING)
        recorder.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield recorder
        finally:
            server.stop(grace=None).wait()
