"""One seam between our errors and Dynamo's exceptions (spec 0.2, 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from trio_sidecar.errors import ErrorKind, SidecarError

if TYPE_CHECKING:
    from trio_sidecar.worker.binding import Binding

__all__ = ["RuntimeFailed", "to_dynamo"]

log = structlog.get_logger("trio_sidecar.worker")


class RuntimeFailed(SidecarError):
    """Dynamo's runtime could not register or serve, or ended without being asked to."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"Dynamo's runtime failed: {reason}")


def to_dynamo(binding: Binding, error: Exception, *, request_id: str = "") -> Exception:
    """The exception that makes Dynamo answer with the right status: 400 for the caller's fault, 503 or 504 for ours.

    The message of an invalid argument reaches the client, the others only the logs. An error that is not ours is a bug:
    it is logged with its traceback and becomes ``Unknown``, because Dynamo takes some of Python's own errors for the
    caller's fault.
    """
    if isinstance(error, SidecarError):
        return binding.errors[error.kind](str(error))
    log.error("request_crashed", request_id=request_id, exc_info=error)
    return binding.errors[ErrorKind.UNKNOWN](f"internal error: {type(error).__name__}")
