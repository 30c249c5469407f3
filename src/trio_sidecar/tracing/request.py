"""One request's spans: the request, and in it one phase after another."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from trio_sidecar.tracing.headers import passed_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.tracing.spans import Attribute, Span, Tracer

__all__ = ["UNTRACED", "Phase", "RequestTrace", "trace_request"]

REQUEST = "request"


class Phase(enum.Enum):
    """What a request is waiting for; the values are the spans' names."""

    ADMISSION = "admission"
    STREAM_WAIT = "wait_for_stream"
    FIRST_TOKEN = "first_token"  # noqa: S105
    STREAM = "stream"


class RequestTrace(Protocol):
    """What is told about a request as it happens."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The trace context for the engine; empty if there is none."""
        ...

    def enter(self, phase: Phase) -> None:
        """The phase before is over, and this one begins."""
        ...

    def released(self) -> None:
        """The last phase is over: the engine has nothing to do with the request any more."""
        ...

    def end(self, reason: str, *, failure: str = "", prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """The request is over; a second end changes nothing.

        Args:
            reason: How it ended, from a short list.
            failure: The name of a status, if it has failed.
            prompt_tokens: Length of the prompt.
            output_tokens: How many tokens the client was given.
        """
        ...


def trace_request(tracer: Tracer, headers: Mapping[str, object] | None, role: str) -> RequestTrace:
    """Begin a request, in its admission.

    Args:
        tracer: Makes the spans.
        headers: Those that came with the request; the trace context in them, if it is well-formed, is continued.
        role: What we are to whoever has sent the request.
    """
    context = passed_on(headers)
    if not tracer.enabled:
        return _Untraced(context) if context else UNTRACED
    span = tracer.begin(REQUEST, context, serves=True, attributes={"role": role})
    return _Traced(tracer, span) if span.recorded else _Untraced(span.headers)


class _Untraced:
    """Nobody traces here, or nobody records this one; the context goes on."""

    __slots__ = ("headers",)

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def enter(self, phase: Phase) -> None:
        pass

    def released(self) -> None:
        pass

    def end(self, reason: str, *, failure: str = "", prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        pass


UNTRACED: RequestTrace = _Untraced({})
"""A request without a trace."""


class _Traced:
    """Spans of ours around the engine's."""

    __slots__ = ("_ended", "_phase", "_request", "_tracer", "headers")

    def __init__(self, tracer: Tracer, request: Span) -> None:
        self._tracer = tracer
        self._request = request
        self._phase: Span | None = tracer.begin(Phase.ADMISSION.value, request)
        self._ended = False
        self.headers = request.headers

    def enter(self, phase: Phase) -> None:
        if not self._ended:
            self.released()
            self._phase = self._tracer.begin(phase.value, self._request)

    def released(self) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None

    def end(self, reason: str, *, failure: str = "", prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        if self._ended:
            return
        self._ended = True
        if self._phase is not None:
            self._phase.end(failure=failure)
        attributes: dict[str, Attribute] = {"end_reason": reason}
        if prompt_tokens or output_tokens:
            attributes |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        self._request.end(failure=failure, attributes=attributes)
