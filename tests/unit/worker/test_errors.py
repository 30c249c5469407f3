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
from trio_sidecar.worker.errors import to_dynamo


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


def test_bugs() -> None:
    """A bug is logged with its traceback; its text, which may hold anything, stays here."""
    with structlog.testing.capture_logs() as logs:
        converted = to_dynamo(FakeDynamo().binding, KeyError("secret"), request_id="r1")
    assert ERRORS[ErrorKind.UNKNOWN] is type(converted)
    assert "internal error: KeyError" == str(converted)
    assert ("request_crashed", "r1") == (logs[0]["event"], logs[0]["request_id"])
