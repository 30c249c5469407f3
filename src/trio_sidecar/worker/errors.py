"""One seam between our errors and Dynamo's exceptions (spec 0.2, 4)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import structlog

from trio_sidecar.errors import ErrorKind, SidecarError

if TYPE_CHECKING:
    from trio_sidecar.worker.binding import Binding

__all__ = ["RuntimeFailed", "in_client_terms", "to_dynamo"]

_CLIENT_NAMES = {
    "decoding.choice": "guided_choice",
    "decoding.grammar": "guided_grammar",
    "decoding.json": "response_format or guided_json",
    "decoding.json_object": "response_format",
    "decoding.regex": "guided_regex",
    "decoding.structural_tag": "response_format or structural_tag",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_sequences": "n",
    "output_candidates.top_n": "top_logprobs",
    "prompt_candidates.top_n": "prompt_logprobs",
    "stop_strings": "stop",
    "token_ids": "prompt",
}
"""What OpenAI's API calls a field of the wire, where the names differ."""

_WIRE_NAME = re.compile(
    rf"(?<![\w.(])(?:(?:(?:stopping|sampling)\.)?(?P<renamed>{'|'.join(map(re.escape, _CLIENT_NAMES))})"
    r"|(?:stopping|sampling|decoding|kv)\.(?P<same>\w+))(?!\.?\w)"
)

log = structlog.get_logger("trio_sidecar.worker")


class RuntimeFailed(SidecarError):
    """Dynamo's runtime could not register or serve, or ended without being asked to."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"Dynamo's runtime failed: {reason}")


def in_client_terms(message: str) -> str:
    """A refusal with the client's name beside each field of the wire that is called otherwise.

    Engines know only the wire, and a client only what it has sent.
    """

    def rename(found: re.Match[str]) -> str:
        renamed = found["renamed"]
        return f"{_CLIENT_NAMES[renamed]} ({renamed})" if renamed else found["same"]

    return _WIRE_NAME.sub(rename, message)


def to_dynamo(binding: Binding, error: Exception, *, request_id: str = "") -> Exception:
    """The exception that makes Dynamo answer with the right status: 400 for the caller's fault, 503 or 504 for ours.

    The message of an invalid argument reaches the client, the others only the logs. An error that is not ours is a bug:
    it is logged with its traceback and becomes ``Unknown``, because Dynamo takes some of Python's own errors for the
    caller's fault.
    """
    if isinstance(error, SidecarError):
        told = in_client_terms(str(error)) if error.kind is ErrorKind.INVALID_ARGUMENT else str(error)
        return binding.errors[error.kind](told)
    log.error("request_crashed", request_id=request_id, exc_info=error)
    return binding.errors[ErrorKind.UNKNOWN](f"internal error: {type(error).__name__}")
