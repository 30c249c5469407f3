"""gRPC headers, read and written."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest

from trio_sidecar.errors import StatusCode
from trio_sidecar.server.headers import (
    MAX_MESSAGE_CHARS,
    BadHeaders,
    RequestHeaders,
    parse_headers,
    rejection,
    trailers,
)

GOOD = {b":method": b"POST", b":path": b"/s/m", b"content-type": b"application/grpc", b"te": b"trailers"}


def parse(**changes: Any) -> RequestHeaders | BadHeaders:
    """Parse good headers with changes; None leaves one out, underscores stand for dashes."""
    headers: dict[bytes, Any] = GOOD | {name.replace("_", "-").encode(): value for name, value in changes.items()}
    return parse_headers([(name, value) for name, value in headers.items() if value is not None])


def test_good_headers() -> None:
    """Path, metadata without the protocol's own headers, no deadline."""
    parsed = parse(x_data_parallel_rank=b"3", grpc_encoding=b"gzip", trace_bin=b"AA", user_agent=b"me")
    assert isinstance(parsed, RequestHeaders)
    assert ("/s/m", None, "gzip") == (parsed.path, parsed.timeout_secs, parsed.encoding)
    assert {"x-data-parallel-rank": "3", "user-agent": "me"} == parsed.metadata


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"40m", 0.04),
        (b"50u", 5e-5),
        (b"99999999n", 0.099999999),
        (b"0S", 0.0),
    ],
)
def test_timeouts(text: bytes, seconds: float) -> None:
    """Every unit of the specification."""
    parsed = parse(grpc_timeout=text)
    assert isinstance(parsed, RequestHeaders)
    assert seconds == pytest.approx(parsed.timeout_secs)


@pytest.mark.parametrize("text", [b"", b"1", b"S", b"-1S", b"1.5S", b"123456789S", b"1X", b" 1S", "\u0661S".encode()])
def test_malformed_timeouts(text: bytes) -> None:
    """The message names the header and the form."""
    parsed = parse(grpc_timeout=text)
    assert isinstance(parsed, BadHeaders)
    assert StatusCode.INVALID_ARGUMENT == parsed.status
    assert "grpc-timeout" in parsed.reason


@pytest.mark.parametrize("value", [b"application/grpc+proto", b"application/grpc; charset=utf-8"])
def test_content_types(value: bytes) -> None:
    """Subtype proto and parameters are fine."""
    assert isinstance(parse(**{"content-type": value}), RequestHeaders)


@pytest.mark.parametrize("value", [None, b"application/json", b"application/grpc+json", b"application/grpc-web"])
def test_foreign_content_types(value: bytes | None) -> None:
    """Anything else is refused on HTTP's level."""
    parsed = parse(**{"content-type": value})
    assert isinstance(parsed, BadHeaders)
    assert (":status", "415") == rejection(parsed)[0]


def test_only_post() -> None:
    """A browser's GET is no gRPC call."""
    parsed = parse(**{":method": b"GET"})
    assert isinstance(parsed, BadHeaders)
    assert 405 == parsed.http_status


def test_odd_bytes_in_metadata_are_kept_from_harm() -> None:
    """A byte that is no UTF-8 is replaced, so that whoever reads the value can refuse it."""
    parsed = parse(x_data_parallel_rank=b"\xff1")
    assert isinstance(parsed, RequestHeaders)
    assert "\ufffd1" == parsed.metadata["x-data-parallel-rank"]


@pytest.mark.parametrize("message", ["plain", "50 %", "é\n日本", "a" * 10_000])
def test_status_messages(message: str) -> None:
    """Any text travels as printable ASCII, and a very long one is cut."""
    headers = dict(trailers(StatusCode.INTERNAL, message, only=False))
    assert "13" == headers["grpc-status"]
    assert all(" " <= char <= "~" for char in headers["grpc-message"])
    decoded = unquote(headers["grpc-message"])
    assert message[: MAX_MESSAGE_CHARS - 1] == decoded[: MAX_MESSAGE_CHARS - 1]
    assert len(decoded) <= MAX_MESSAGE_CHARS
    assert ":status" not in headers
