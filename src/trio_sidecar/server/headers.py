"""gRPC request and response headers as pure functions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

import attrs

from trio_sidecar.errors import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["RESPONSE_HEADERS", "BadHeaders", "RequestHeaders", "parse_headers", "rejection", "trailers"]

CONTENT_TYPE = "application/grpc"
RESPONSE_HEADERS = ((":status", "200"), ("content-type", "application/grpc+proto"))

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_TIMEOUT_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MESSAGE_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if code != ord("%"))
MAX_MESSAGE_CHARS = 4096
"""Longer status messages are cut: headers have limits, and a client may refuse a block that is too large."""


@attrs.frozen(slots=True)
class BadHeaders:
    """A request that is no gRPC call; it is answered on HTTP's level where gRPC cannot be assumed.

    Attributes:
        http_status: 200 where a gRPC client will read the status.
    """

    http_status: int
    status: StatusCode
    reason: str


@attrs.frozen(slots=True, kw_only=True)
class RequestHeaders:
    """A call as its headers describe it.

    Attributes:
        path: ``/service/method``.
        metadata: The caller's own text headers; of a repeated one, the last.
        timeout_secs: None is no deadline.
        encoding: Compression of messages whose compressed flag is set.
    """

    path: str
    metadata: Mapping[str, str]
    timeout_secs: float | None
    encoding: str


def parse_headers(raw: Iterable[tuple[bytes | str, bytes | str]]) -> RequestHeaders | BadHeaders:
    """Read the header list of a request."""
    headers = {_text(name): _text(value) for name, value in raw}
    if headers.get(":method") != "POST":
        return BadHeaders(405, StatusCode.UNIMPLEMENTED, "gRPC calls use the POST method")
    base, _, subtype = headers.get("content-type", "").partition(";")[0].strip().partition("+")
    if base != CONTENT_TYPE or subtype not in ("", "proto"):
        return BadHeaders(415, StatusCode.INTERNAL, f"content-type must be {CONTENT_TYPE} or {CONTENT_TYPE}+proto")
    timeout = None
    if (text := headers.get("grpc-timeout")) is not None:
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            reason = f"grpc-timeout {text[:32]!r} is malformed; it is up to 8 digits and one of H M S m u n"
            return BadHeaders(200, StatusCode.INVALID_ARGUMENT, reason)
        timeout = int(match[1]) * _TIMEOUT_UNITS[match[2]]
    return RequestHeaders(
        path=headers.get(":path", ""),
        metadata={name: value for name, value in headers.items() if _is_metadata(name)},
        timeout_secs=timeout,
        encoding=headers.get("grpc-encoding", "identity"),
    )


def trailers(status: StatusCode, message: str, *, only: bool) -> list[tuple[str, str]]:
    """The headers that end a call.

    Args:
        status: How it ended.
        message: For people; any text.
        only: Whether no response headers were sent before.
    """
    headers = list(RESPONSE_HEADERS) if only else []
    headers.append(("grpc-status", str(int(status))))
    if message:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        headers.append(("grpc-message", quote(message, safe=_MESSAGE_SAFE, errors="replace")))
    return headers


def rejection(bad: BadHeaders) -> list[tuple[str, str]]:
    """The headers that answer a request that is no gRPC call."""
    head = trailers(bad.status, bad.reason, only=True)
    return [(":status", str(bad.http_status)), *head[1:]]


def _is_metadata(name: str) -> bool:
    return not (name.startswith((":", "grpc-")) or name.endswith("-bin") or name in ("te", "content-type"))


def _text(value: bytes | str) -> str:
    # Not strict: a client's odd byte must not bring the connection down; whoever reads the value refuses it.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
