"""The seam between our errors and Dynamo's exceptions."""

from __future__ import annotations

import pytest
import structlog

from support.fake_dynamo import ERRORS, FakeDynamo
from trio_sidecar.errors import (
    ConnectError,
    ConnectionTimeoutError,
    EngineShutdown,
    ErrorKind,
    InvalidConfig,
    InvalidRequest,
    ProtocolError,
    RequestCancelled,
    RpcError,
    SidecarError,
    StatusCode,
)
from trio_sidecar.worker.errors import in_client_terms, to_dynamo


@pytest.mark.rule("R4.5", "R4.6")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("n: 2"), ErrorKind.INVALID_ARGUMENT),
        (InvalidConfig("--namespace", "must not be empty"), ErrorKind.INVALID_ARGUMENT),
        (ProtocolError("x"), ErrorKind.UNKNOWN),
        (EngineShutdown("x"), ErrorKind.ENGINE_SHUTDOWN),
        (ConnectError("x"), ErrorKind.CANNOT_CONNECT),
        (ConnectionTimeoutError("x"), ErrorKind.CONNECTION_TIMEOUT),
        (RequestCancelled("x"), ErrorKind.CANCELLED),
        *((RpcError(status, "x", rpc="Test"), status.kind) for status in StatusCode),
    ],
)
def test_kinds(error: SidecarError, kind: ErrorKind) -> None:
    """Every error becomes the exception of its kind, with its message."""
    converted = to_dynamo(FakeDynamo().binding, error)
    assert ERRORS[kind] is type(converted)
    assert str(error) == str(converted)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "min_new_tokens 9 is greater than the effective max_new_tokens 4",
            "min_tokens (min_new_tokens) 9 is greater than the effective max_tokens (max_new_tokens) 4",
        ),
        ("stopping.stop_token_ids id 9 is out of range", "stop_token_ids id 9 is out of range"),
        ("stopping.stop_strings holds an empty string", "stop (stop_strings) holds an empty string"),
        ("token_ids must hold at least one token id", "prompt (token_ids) must hold at least one token id"),
        ("decoding.json is not supported", "response_format or guided_json (decoding.json) is not supported"),
        ("decoding.json_object is not supported", "response_format (decoding.json_object) is not supported"),
        ("decoding.logit_bias is not supported", "logit_bias is not supported"),
        ("output_candidates.top_n 21 is more than", "top_logprobs (output_candidates.top_n) 21 is more than"),
        ("prompt_candidates.token_ids, allowed_token_ids", "prompt_candidates.token_ids, allowed_token_ids"),
        ("prompt (token_ids) has none; min_tokens 3", "prompt (token_ids) has none; min_tokens 3"),
    ],
)
def test_refusals_name_the_clients_field(message: str, told: str) -> None:
    """Beside a field of the wire stands what the client calls it; what it cannot have sent stays as it is."""
    assert told == in_client_terms(message)
    error = RpcError(StatusCode.INVALID_ARGUMENT, message, rpc="GenerateStream")
    assert f"GenerateStream: {told} (InvalidArgument)" == str(to_dynamo(FakeDynamo().binding, error))
    failed = RpcError(StatusCode.INTERNAL, message, rpc="GenerateStream")
    assert message in str(to_dynamo(FakeDynamo().binding, failed))


def test_bugs() -> None:
    """A bug is logged with its traceback; its text, which may hold anything, stays here."""
    with structlog.testing.capture_logs() as logs:
        converted = to_dynamo(FakeDynamo().binding, KeyError("secret"), request_id="r1")
    assert ERRORS[ErrorKind.UNKNOWN] is type(converted)
    assert "internal error: KeyError" == str(converted)
    assert ("request_crashed", "r1") == (logs[0]["event"], logs[0]["request_id"])
