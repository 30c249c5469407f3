"""gRPC over HTTP/2 as pure functions: message framing, request headers, and what a response's end means (spec 4)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import trio_sidecar
from trio_sidecar.errors import InvalidRequest, NoGrpcAnswer, RpcError, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "PREFIX_BYTES",
    "MessageSplitter",
    "frame_message",
    "grpc_timeout",
    "request_headers",
    "response_error",
    "status_of_reset",
]

PREFIX_BYTES = 5
"""One byte of flags, four of length."""

_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"[ -~]*")
_TIMEOUT_UNITS = (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("S", 1.0), ("M", 60.0), ("H", 3600.0))
_MAX_TIMEOUT_DIGITS = 8

_STATUS_OF_HTTP = {
    "400": StatusCode.INTERNAL,
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    "429": StatusCode.UNAVAILABLE,
    "502": StatusCode.UNAVAILABLE,
    "503": StatusCode.UNAVAILABLE,
    "504": StatusCode.UNAVAILABLE,
}
_STATUS_OF_RESET = {
    7: StatusCode.UNAVAILABLE,  # REFUSED_STREAM
    8: StatusCode.CANCELLED,  # CANCEL
    11: StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    12: StatusCode.PERMISSION_DENIED,  # INADEQUATE_SECURITY
}


def frame_message(message: bytes) -> bytes:
    """The message behind its prefix, uncompressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageSplitter:
    """Splits a byte stream into gRPC messages as the bytes arrive.

    Attributes:
        messages: Complete messages that nobody has taken yet, oldest first.
    """

    __slots__ = ("_have", "_max", "_need", "_parts", "messages")

    def __init__(self, max_message_bytes: int) -> None:
        self.messages: list[bytes] = []
        self._max = max_message_bytes
        # A message under way is kept as a list, since joining it anew for every frame would be quadratic.
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._parts)

    def take(self, limit: int | None = None) -> list[bytes]:
        """All complete messages, or the oldest ones up to a limit; they are the caller's now."""
        if limit is not None:
            messages = self.messages[:limit]
            del self.messages[:limit]
            return messages
        messages, self.messages = self.messages, []
        return messages

    def feed(self, data: bytes) -> None:
        """Add bytes.

        Raises:
            RpcError: RESOURCE_EXHAUSTED for a message over the limit, however much of it has arrived; INTERNAL for a
                compressed one, since we offer no compression.
        """
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        at = 0
        size = len(data)
        need = PREFIX_BYTES
        while size - at >= PREFIX_BYTES:
            length = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
            if data[at]:
                raise RpcError(StatusCode.INTERNAL, f"the peer sent a compressed message (flag {data[at]}), unasked")
            if length > self._max:
                raise RpcError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"the peer sent a message of {length} bytes, more than the limit of {self._max}",
                )
            end = at + PREFIX_BYTES + length
            if end > size:
                need = PREFIX_BYTES + length
                break
            self.messages.append(data[at + PREFIX_BYTES : end])
            at = end
        if at < size:
            self._parts.append(data[at:] if at else data)
            self._have = size - at
            self._need = need


def grpc_timeout(seconds: float) -> str:
    """The ``grpc-timeout`` header: the finest unit that needs at most eight digits, never zero."""
    for unit, unit_seconds in _TIMEOUT_UNITS:
        count = max(1, math.ceil(round(seconds / unit_seconds, 6)))
        if count < 10**_MAX_TIMEOUT_DIGITS:
            return f"{count}{unit}"
    return "9" * _MAX_TIMEOUT_DIGITS + "H"


def request_headers(
    *,
    path: str,
    authority: str,
    scheme: str,
    metadata: Mapping[str, str],
    timeout_secs: float | None,
) -> list[tuple[str, str]]:
    """The headers of a request.

    Raises:
        InvalidRequest: A metadata key or value that HTTP/2 cannot carry, or a key that belongs to gRPC.
    """
    headers = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
    if timeout_secs is not None:
        headers.append(("grpc-timeout", grpc_timeout(timeout_secs)))
    headers += [
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", f"trio-sidecar/{trio_sidecar.__version__}"),
    ]
    for key, value in metadata.items():
        check_metadata(key, value)
        headers.append((key, value))
    return headers


def check_metadata(key: str, value: str) -> None:
    """Refuse metadata that may not be sent.

    Raises:
        InvalidRequest: Names the key, never the value, which may be a secret.
    """
    if (
        not _METADATA_KEY.fullmatch(key)
        or key.startswith("grpc-")
        or key.endswith("-bin")
        or key in ("te", "content-type", "user-agent", "connection", "transfer-encoding", "host", "content-length")
    ):
        reason = f"metadata key {key!r} is not allowed: lower-case letters, digits, '_', '.' and '-', not one of gRPC's"
        raise InvalidRequest(reason)
    if not _METADATA_VALUE.fullmatch(value):
        reason = f"metadata {key!r} must be printable ASCII"
        raise InvalidRequest(reason)


def decode_headers(headers: Iterable[tuple[bytes | str, bytes | str]]) -> dict[str, str]:
    """Headers by name; any byte is accepted, since a peer's bad header must not take its connection down."""
    return {_text(key): _text(value) for key, value in headers}


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def check_response_headers(headers: Mapping[str, str]) -> RpcError | None:
    """The error that the first headers alone stand for: not a gRPC answer, or a refusal without a message."""
    if "grpc-status" in headers:
        return response_error(headers, {})
    http = headers.get(":status", "none")
    if http != "200":
        status = _STATUS_OF_HTTP.get(http, StatusCode.UNKNOWN)
        return NoGrpcAnswer(status, f"the peer answered with HTTP status {http} instead of a gRPC response")
    content_type = headers.get("content-type", "")
    if not content_type.startswith("application/grpc"):
        return NoGrpcAnswer(StatusCode.UNKNOWN, f"the peer answered with content type {content_type[:100]!r}, not gRPC")
    return None


def response_error(headers: Mapping[str, str], trailers: Mapping[str, str]) -> RpcError | None:
    """What the end of a response says: None for OK; trailers-only responses carry the status in their headers."""
    last = trailers if "grpc-status" in trailers else headers
    text = last.get("grpc-status")
    if text is None:
        return check_response_headers(headers) or RpcError(StatusCode.UNKNOWN, "the response has no grpc-status")
    detail = unquote_to_bytes(last.get("grpc-message", "").encode("latin-1")).decode("utf-8", "replace")
    try:
        status = StatusCode(int(text))
    except ValueError:
        return RpcError(StatusCode.UNKNOWN, f"unknown grpc-status {text[:20]!r}: {detail}")
    return None if status is StatusCode.OK else RpcError(status, detail)


def status_of_reset(code: int) -> StatusCode:
    """The gRPC status for an HTTP/2 error code of RST_STREAM."""
    return _STATUS_OF_RESET.get(code, StatusCode.INTERNAL)
