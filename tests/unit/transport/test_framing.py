"""gRPC over HTTP/2 as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_sidecar.errors import InvalidRequest, RpcError, StatusCode
from trio_sidecar.transport.framing import (
    MessageSplitter,
    frame_message,
    grpc_timeout,
    request_headers,
    response_error,
    status_of_reset,
)

LIMIT = 1 << 20


@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 40), min_size=1))
def test_splitter_finds_the_messages_however_bytes_arrive(messages: list[bytes], cuts: list[int]) -> None:
    """The messages come out whole and in order for every way to cut the stream of bytes."""
    data = b"".join(frame_message(message) for message in messages)
    splitter = MessageSplitter(LIMIT)
    at = index = 0
    while at < len(data):
        step = cuts[index % len(cuts)]
        splitter.feed(data[at : at + step])
        at += step
        index += 1
    assert messages == splitter.take()
    assert not splitter.partial


def test_splitter_knows_an_unfinished_message() -> None:
    """A message that has begun is not handed out, and is known to be unfinished."""
    splitter = MessageSplitter(LIMIT)
    splitter.feed(frame_message(b"whole") + frame_message(b"half")[:-1])
    assert [b"whole"] == splitter.take()
    assert splitter.partial


def test_splitter_hands_out_the_oldest_messages_up_to_a_number() -> None:
    """Those beyond it are kept for the next time, in order."""
    splitter = MessageSplitter(LIMIT)
    splitter.feed(b"".join(frame_message(message) for message in (b"1", b"2", b"3")))
    assert [b"1", b"2"] == splitter.take(2)
    assert [b"3"] == splitter.take(2)
    assert [] == splitter.take(2)


@pytest.mark.rule("FR-105")
@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_splitter_refuses_a_message_over_the_limit_by_its_prefix(length: int) -> None:
    """A length over the limit is refused before any of the message has arrived."""
    with pytest.raises(RpcError, match=str(length)) as caught:
        MessageSplitter(LIMIT).feed(b"\0" + length.to_bytes(4, "big"))
    assert StatusCode.RESOURCE_EXHAUSTED is caught.value.status


def test_splitter_takes_a_message_at_the_limit() -> None:
    """The limit itself is allowed."""
    splitter = MessageSplitter(LIMIT)
    splitter.feed(frame_message(bytes(LIMIT)))
    assert [LIMIT] == [len(message) for message in splitter.take()]


def test_splitter_refuses_compressed_messages() -> None:
    """We offer no compression, so a compressed message is a fault of the peer."""
    with pytest.raises(RpcError, match="compressed"):
        MessageSplitter(LIMIT).feed(b"\x01\0\0\0\x01x")


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (0.0, "1n"),
        (0.05, "50000000n"),
        (0.1, "100000u"),
        (1.5, "1500000u"),
        (100, "100000m"),
        (1800, "1800000m"),
        (99_999_999, "99999999S"),
        (100_000_000, "1666667M"),
        (1e18, "99999999H"),
    ],
)
def test_timeout_header(seconds: float, header: str) -> None:
    """The header has at most eight digits, is never zero and never shorter than asked for."""
    assert header == grpc_timeout(seconds)


def test_request_headers_begin_with_pseudo_headers_and_end_with_metadata() -> None:
    """Metadata comes last, and the timeout is there only if there is one."""
    headers = request_headers(
        path="/a/b", authority="h:1", scheme="http", metadata={"x-data-parallel-rank": "3"}, timeout_secs=None
    )
    assert [":method", ":scheme", ":path", ":authority"] == [name for name, _ in headers[:4]]
    assert ("x-data-parallel-rank", "3") == headers[-1]
    assert "grpc-timeout" not in dict(headers)
    assert ("te", "trailers") in headers


@pytest.mark.parametrize(
    "metadata",
    [{"X": "a"}, {"grpc-timeout": "1S"}, {"a b": "c"}, {"te": "x"}, {"k": "a\nb"}, {"k": "ä"}, {"k-bin": "a"}],
)
def test_metadata_that_cannot_be_sent_is_refused_by_name(metadata: dict[str, str]) -> None:
    """A bad key or value is refused, and the message names the key."""
    with pytest.raises(InvalidRequest, match=next(iter(metadata))):
        request_headers(path="/", authority="h", scheme="http", metadata=metadata, timeout_secs=None)


@pytest.mark.rule("R4.1")
@pytest.mark.parametrize("status", [status for status in StatusCode if status is not StatusCode.OK])
def test_every_status_of_the_trailers_is_an_error(status: StatusCode) -> None:
    """Each of the sixteen failing codes becomes an error with the peer's message."""
    error = response_error({":status": "200"}, {"grpc-status": str(int(status)), "grpc-message": "failure"})
    assert error is not None
    assert (status, "failure") == (error.status, error.detail)
    assert f"Test: failure ({status.label})" == str(error.named("Test"))


@pytest.mark.parametrize(
    ("headers", "trailers", "status", "words"),
    [
        ({":status": "200"}, {"grpc-status": "0"}, None, ""),
        ({":status": "200", "grpc-status": "0"}, {}, None, ""),
        ({":status": "200", "grpc-status": "5", "grpc-message": "no%20such"}, {}, StatusCode.NOT_FOUND, "no such"),
        (
            {":status": "200"},
            {"grpc-status": "3", "grpc-message": "%E4%BD%A0 %zz %"},
            StatusCode.INVALID_ARGUMENT,
            "你 %zz %",
        ),
        ({":status": "200"}, {"grpc-status": "3", "grpc-message": "\xff%ff"}, StatusCode.INVALID_ARGUMENT, "\ufffd"),
        ({":status": "200", "content-type": "application/grpc"}, {}, StatusCode.UNKNOWN, "no grpc-status"),
        ({":status": "200", "content-type": "text/html"}, {}, StatusCode.UNKNOWN, "text/html"),
        ({":status": "404"}, {}, StatusCode.UNIMPLEMENTED, "HTTP status 404"),
        ({":status": "503"}, {}, StatusCode.UNAVAILABLE, "HTTP status 503"),
        ({":status": "401"}, {}, StatusCode.UNAUTHENTICATED, "401"),
        ({":status": "418"}, {}, StatusCode.UNKNOWN, "418"),
        ({":status": "200"}, {"grpc-status": "99"}, StatusCode.UNKNOWN, "99"),
        ({":status": "200"}, {"grpc-status": "x"}, StatusCode.UNKNOWN, "'x'"),
    ],
)
def test_meaning_of_a_response_end(
    headers: dict[str, str], trailers: dict[str, str], status: StatusCode | None, words: str
) -> None:
    """Status and message come from trailers, from headers alone, or else from HTTP; the text is percent-decoded."""
    error = response_error(headers, trailers)
    assert status == (error and error.status)
    assert words in (error.detail if error else "")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, StatusCode.INTERNAL),
        (2, StatusCode.INTERNAL),
        (7, StatusCode.UNAVAILABLE),
        (8, StatusCode.CANCELLED),
        (11, StatusCode.RESOURCE_EXHAUSTED),
        (99, StatusCode.INTERNAL),
    ],
)
def test_status_of_a_reset(code: int, status: StatusCode) -> None:
    """HTTP/2 error codes map to statuses as in gRPC's own table."""
    assert status is status_of_reset(code)
