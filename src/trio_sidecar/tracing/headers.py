"""W3C trace context as headers: what of a request's may go on, without any tracing library.

A context that is not well-formed is dropped, as the standard wants it, and never an error: it comes from whoever sent
the request, and a request must not fail because of what was meant to watch it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TRACEPARENT", "TRACESTATE", "passed_on", "with_trace"]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

MAX_PARENT_CHARS = 256
"""Later versions of the standard may append to ``traceparent``; ours has 55 characters."""

MAX_STATE_CHARS = 512
"""What everyone has to be able to pass on of ``tracestate``; of a longer one the last members are dropped."""

_IDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_PARENT = re.compile(rf"00{_IDS}|(?!00|ff)[0-9a-f]{{2}}{_IDS}(-[!-~]*)?")
_STATE = re.compile(r"[ -~]+")  # what gRPC allows in metadata, too


def passed_on(headers: Mapping[str, object] | None) -> dict[str, str]:
    """The trace context in a request's headers, fit to be sent on; empty if there is none, or a malformed one.

    Args:
        headers: Any; only ``traceparent`` and ``tracestate`` are looked at.
    """
    if not headers:
        return {}
    parent = headers.get(TRACEPARENT)
    if not isinstance(parent, str) or len(parent) > MAX_PARENT_CHARS or not _PARENT.fullmatch(parent):
        return {}
    state = _state(headers.get(TRACESTATE))
    return {TRACEPARENT: parent, TRACESTATE: state} if state else {TRACEPARENT: parent}


def with_trace(metadata: Mapping[str, str], trace: Mapping[str, str]) -> Mapping[str, str]:
    """A call's metadata with this trace context in place of its own."""
    if TRACEPARENT in metadata or TRACESTATE in metadata:
        metadata = {name: value for name, value in metadata.items() if name not in (TRACEPARENT, TRACESTATE)}
    return {**metadata, **trace} if trace else metadata


def _state(text: object) -> str:
    if not isinstance(text, str) or len(text) > 16 * MAX_STATE_CHARS or not _STATE.fullmatch(text):
        return ""
    text = text.strip()
    while len(text) > MAX_STATE_CHARS:
        text = text.rpartition(",")[0].rstrip()
    return text
