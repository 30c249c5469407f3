"""gRPC over HTTP/2 as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trio_sidecar
from trio_sidecar.errors import InvalidRequest, NoGrpcAnswer, RpcError, StatusCode
from trio_sidecar.transport.framing import (
    MessageSplitter,
    check_metadata,
    check_response_headers,
    decode_headers,
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
    with pytest.raises(RpcError) as caught:
        MessageSplitter(LIMIT).feed(b"\x02\0\0\0\x01x")
    assert StatusCode.INTERNAL is caught.value.status
    assert "the peer sent a compressed message (flag 2), unasked" == caught.value.detail


def test_splitter_tells_both_lengths_of_a_message_over_the_limit() -> None:
    """The one that was announced, and the one that is allowed."""
    splitter = MessageSplitter(9)
    with pytest.raises(RpcError) as caught:
        splitter.feed(frame_message(bytes(9)) + b"\0\0\0\0\x0a")
    assert "the peer sent a message of 10 bytes, more than the limit of 9" == caught.value.detail


def test_splitter_does_not_join_a_message_before_it_is_whole() -> None:
    """Parts wait as they came, because joining them anew each time would be quadratic."""
    splitter = MessageSplitter(LIMIT)
    frame = frame_message(bytes(100))
    splitter.feed(frame_message(bytes(99)) + frame[:20])
    for at in range(20, 100, 20):
        splitter.feed(frame[at : at + 20])
        assert at // 20 + 1 == len(splitter._parts)
    splitter.feed(frame[100:])
    assert [bytes(99), bytes(100)] == splitter.take()
    assert [] == splitter._parts


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (0.0, "1n"),
        (1.4e-9, "2n"),
        (3e-9 + 2e-16, "3n"),  # what is left over is the clock's arithmetic, not time
        (0.099999999, "99999999n"),
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
    usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/a/b"),
        (":authority", "h:1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", f"trio-sidecar/{trio_sidecar.__version__}"),
    ]
    assert [*usual, ("x-data-parallel-rank", "3")] == headers
    headers = request_headers(path="/a/b", authority="h:1", scheme="http", metadata={}, timeout_secs=5)
    assert [*usual[:4], ("grpc-timeout", "5000000u"), *usual[4:]] == headers


@pytest.mark.parametrize(
    "metadata",
    [{"X": "a"}, {"grpc-timeout": "1S"}, {"a b": "c"}, {"te": "x"}, {"k": "a\nb"}, {"k": "ä"}, {"k-bin": "a"}],
)
def test_metadata_that_cannot_be_sent_is_refused_by_name(metadata: dict[str, str]) -> None:
    """A bad key or value is refused, and the message names the key."""
    with pytest.raises(InvalidRequest, match=next(iter(metadata))):
        request_headers(path="/", authority="h", scheme="http", metadata=metadata, timeout_secs=None)


@pytest.mark.parametrize(
    "key",
    [
        "", "te", "content-type", "user-agent", "connection", "transfer-encoding", "host", "content-length",
        "grpc-timeout", "grpc-", "x-bin", "-bin", "X-Rank", "a b", ":path",
    ],
)  # fmt: skip
def test_keys_that_belong_to_http_or_grpc_are_refused(key: str) -> None:
    """The message says which are allowed."""
    with pytest.raises(InvalidRequest) as caught:
        check_metadata(key, "value")
    assert (
        f"InvalidRequest: metadata key {key!r} is not allowed: lower-case letters, digits, '_', '.' and '-', "
        "not one of gRPC's"
    ) == str(caught.value)


@pytest.mark.parametrize("key", ["x-rank", "traceparent", "a.b_c-9", "hosts", "x-te", "grpc", "binary"])
def test_other_keys_are_allowed(key: str) -> None:
    """With any printable value, also an empty one."""
    check_metadata(key, " !~")
    check_metadata(key, "")


@pytest.mark.parametrize("value", ["hunter2\n", "hunter2\x7f", "hunter2é", "\thunter2"])
def test_a_value_that_is_refused_is_not_repeated(value: str) -> None:
    """It may be a secret; the key is enough to find it."""
    with pytest.raises(InvalidRequest) as caught:
        check_metadata("x-key", value)
    assert "InvalidRequest: metadata 'x-key' must be printable ASCII" == str(caught.value)


def test_headers_are_text_whatever_their_bytes() -> None:
    """Each byte is one character, and text stays as it is."""
    assert {"a": "\xff", "b": "c"} == decode_headers([(b"a", b"\xff"), ("b", "c")])


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ({}, StatusCode.UNKNOWN, "the peer answered with HTTP status none instead of a gRPC response"),
        ({":status": "400"}, StatusCode.INTERNAL, "the peer answered with HTTP status 400 instead of a gRPC response"),
        ({":status": "403"}, StatusCode.PERMISSION_DENIED, "the peer answered with HTTP status 403 instead of a gRPC"),
        ({":status": "429"}, StatusCode.UNAVAILABLE, "the peer answered with HTTP status 429 instead of a gRPC"),
        ({":status": "502"}, StatusCode.UNAVAILABLE, "the peer answered with HTTP status 502 instead of a gRPC"),
        ({":status": "504"}, StatusCode.UNAVAILABLE, "the peer answered with HTTP status 504 instead of a gRPC"),
        ({":status": "200"}, StatusCode.UNKNOWN, "the peer answered with content type '', not gRPC"),
        (
            {":status": "200", "content-type": "t" * 101},
            StatusCode.UNKNOWN,
            f"the peer answered with content type '{'t' * 100}', not gRPC",
        ),
        ({":status": "200", "grpc-status": "7", "grpc-message": "no"}, StatusCode.PERMISSION_DENIED, "no"),
    ],
)
def test_headers_that_are_a_refusal_by_themselves(headers: dict[str, str], status: StatusCode, sentence: str) -> None:
    """The error says what came instead of an answer."""
    error = check_response_headers(headers)
    assert error is not None
    assert status is error.status
    assert error.detail.startswith(sentence)
    named = error.named("Check")
    assert isinstance(named, NoGrpcAnswer) is ("grpc-status" not in headers)
    assert ("Check", error.detail) == (named.rpc, named.detail)


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto"])
def test_headers_of_an_answer_are_no_refusal(content_type: str) -> None:
    """Nor is a status of OK."""
    assert check_response_headers({":status": "200", "content-type": content_type}) is None
    assert check_response_headers({":status": "200", "grpc-status": "0"}) is None


def test_a_status_that_nobody_knows_is_shown() -> None:
    """Shortened, with the message beside it, or with nothing."""
    error = response_error({}, {"grpc-status": "9" * 21, "grpc-message": "words"})
    assert error is not None
    assert f"unknown grpc-status '{'9' * 20}': words" == error.detail
    error = response_error({}, {"grpc-status": "x"})
    assert error is not None
    assert "unknown grpc-status 'x': " == error.detail
    refusal = response_error({}, {"grpc-status": "3"})
    assert refusal is not None
    assert refusal.detail == ""


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
        (
            {":status": "200", "content-type": "application/grpc"},
            {},
            StatusCode.UNKNOWN,
            "the response has no grpc-status",
        ),
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
        (12, StatusCode.PERMISSION_DENIED),
        (99, StatusCode.INTERNAL),
    ],
)
def test_status_of_a_reset(code: int, status: StatusCode) -> None:
    """HTTP/2 error codes map to statuses as in gRPC's own table."""
    assert status is status_of_reset(code)
