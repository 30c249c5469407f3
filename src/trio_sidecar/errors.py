"""The error tree.

Sorted by whose fault it is: :class:`InvalidRequest` and :class:`InvalidConfig` are the caller's, :class:`ProtocolError`
and :class:`IncompatibleEngine` the peer's, :class:`RpcError` is what a peer answered, the rest are the world's. Each
error knows its kind for Dynamo, its gRPC status and whether another worker may retry it; the message is built in the
class, and callers branch on attributes, never on text.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Self


class ErrorKind(enum.Enum):
    """How Dynamo classifies a failed request; the values are its names (spec 0.2)."""

    INVALID_ARGUMENT = "InvalidArgument"
    UNKNOWN = "Unknown"
    ENGINE_SHUTDOWN = "EngineShutdown"
    CANNOT_CONNECT = "CannotConnect"
    CONNECTION_TIMEOUT = "ConnectionTimeout"
    CANCELLED = "Cancelled"


class StatusCode(enum.IntEnum):
    """The seventeen gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def label(self) -> str:
        """The name in CamelCase, as the Rust sidecar prints it (R4.2)."""
        return "Ok" if self is StatusCode.OK else "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def kind(self) -> ErrorKind:
        """The kind that Dynamo sees for this status (spec 4)."""
        return _KIND_OF_STATUS.get(self, ErrorKind.UNKNOWN)


_KIND_OF_STATUS = {
    StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND: ErrorKind.INVALID_ARGUMENT,
    StatusCode.OUT_OF_RANGE: ErrorKind.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION: ErrorKind.INVALID_ARGUMENT,
    StatusCode.ALREADY_EXISTS: ErrorKind.INVALID_ARGUMENT,
    StatusCode.UNAVAILABLE: ErrorKind.CANNOT_CONNECT,
    StatusCode.CANCELLED: ErrorKind.CANCELLED,
    StatusCode.DEADLINE_EXCEEDED: ErrorKind.CONNECTION_TIMEOUT,
}


class SidecarError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        kind: How Dynamo classifies it.
        status: The gRPC status that the server face answers with.
        retryable: Whether the same request may succeed on another worker.
    """

    kind: ErrorKind = ErrorKind.UNKNOWN
    status: StatusCode = StatusCode.INTERNAL
    retryable: ClassVar[bool] = False


class InvalidRequest(SidecarError):
    """The caller asked for something that cannot be done; the message names the field and what is allowed."""

    kind = ErrorKind.INVALID_ARGUMENT
    status = StatusCode.INVALID_ARGUMENT

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"InvalidRequest: {reason}")


class InvalidConfig(SidecarError):
    """A flag, a variable or a file holds a value that is not allowed."""

    kind = ErrorKind.INVALID_ARGUMENT
    status = StatusCode.INVALID_ARGUMENT

    def __init__(self, setting: str, reason: str) -> None:
        self.setting = setting
        self.reason = reason
        super().__init__(f"{setting}: {reason}")


class MissingExtra(SidecarError):
    """A command needs packages that an optional extra brings."""

    kind = ErrorKind.INVALID_ARGUMENT
    status = StatusCode.FAILED_PRECONDITION

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} needs the extra '{extra}': pip install 'trio-sidecar[{extra}]'")


class ProtocolError(SidecarError):
    """The peer broke the contract (spec 0.2); not to be confused with :class:`RpcError`, a proper refusal."""

    def __init__(self, reason: str, *, peer: str = "vLLM") -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{peer} sent an invalid gRPC response: {reason}")


class IncompatibleEngine(SidecarError):
    """The engine answers, but is not one that this worker can serve, or no longer the one that it was."""

    kind = ErrorKind.UNKNOWN
    status = StatusCode.FAILED_PRECONDITION


class RpcError(SidecarError):
    """A call ended with a gRPC status other than OK; kind after spec 4.

    Attributes:
        rpc: Short name of the call; may be empty where an engine raises before a face has named the call.
        detail: The peer's message.
    """

    def __init__(self, status: StatusCode, detail: str, *, rpc: str = "") -> None:
        self.status = status
        self.kind = status.kind
        self.detail = detail
        self.rpc = rpc
        super().__init__(f"{rpc or 'call'}: {detail} ({status.label})")

    def named(self, rpc: str) -> Self:
        """The same error, labelled with the call that met it; classes with another constructor have their own."""
        return self if self.rpc == rpc else type(self)(self.status, self.detail, rpc=rpc)


class NoGrpcAnswer(RpcError):
    """The peer answers in HTTP/2, but not as gRPC; the status is the one that stands for its HTTP status."""


class DeadEngine(RpcError):
    """The engine in this process has died: INTERNAL to a gRPC client, as from vLLM; Dynamo may ask another worker."""

    retryable = True

    def __init__(self, *, rpc: str = "") -> None:
        super().__init__(StatusCode.INTERNAL, "the engine has died", rpc=rpc)
        self.kind = ErrorKind.ENGINE_SHUTDOWN

    def named(self, rpc: str) -> Self:
        """The same error, labelled with the call that met it."""
        return self if self.rpc == rpc else type(self)(rpc=rpc)


class ConnectError(SidecarError):
    """No connection could be made, or none is left."""

    kind = ErrorKind.CANNOT_CONNECT
    status = StatusCode.UNAVAILABLE
    retryable = True


class Overloaded(SidecarError):
    """As many requests as are allowed are open, or wait, already; another worker may have room."""

    kind = ErrorKind.CANNOT_CONNECT
    status = StatusCode.RESOURCE_EXHAUSTED
    retryable = True

    def __init__(self, limit: int, reason: str = "") -> None:
        self.limit = limit
        super().__init__(reason or f"this worker has {limit} requests open, as many as --max-inflight-requests allows")


class ConnectionTimeoutError(SidecarError):
    """A start-up phase or a call outlived its deadline."""

    kind = ErrorKind.CONNECTION_TIMEOUT
    status = StatusCode.DEADLINE_EXCEEDED
    retryable = True


class EngineShutdown(SidecarError):
    """The engine, or this worker, is not in a state to serve: not started, started twice, recovering, draining."""

    kind = ErrorKind.ENGINE_SHUTDOWN
    status = StatusCode.UNAVAILABLE
    retryable = True


class OutputClosed(SidecarError):
    """Whoever read our output has gone away; nothing is left to do, and nobody to tell."""


class RequestCancelled(SidecarError):
    """The request was cancelled before it could end by itself."""

    kind = ErrorKind.CANCELLED
    status = StatusCode.CANCELLED


def cause_chain(error: BaseException) -> str:
    """The error and its causes, outermost first, joined by colons (R3.7); repeated texts appear once."""
    parts: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        text = str(at) or type(at).__name__
        if not any(text in part for part in parts):
            parts.append(text)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return ": ".join(parts)
