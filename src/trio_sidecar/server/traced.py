"""A generation on the server's side as spans: the client's context is continued, and the engine gets ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from trio_sidecar.bridge import AioCancelled
from trio_sidecar.errors import SidecarError, StatusCode
from trio_sidecar.server.call import CallGone
from trio_sidecar.tracing import Phase, trace_request, with_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from trio_sidecar.server.call import ServerCall
    from trio_sidecar.tracing import Tracer
    from trio_sidecar.wire import GenerateResponse

__all__ = ["TracedCall"]

ROLE = "server"
VERDICTS = {StatusCode.DEADLINE_EXCEEDED: "timeout", StatusCode.UNAVAILABLE: "shutdown"}


class TracedCall:
    """A context manager around one generation; whatever leaves it is how the call ended.

    Attributes:
        metadata: The call's, with the trace context for the engine.
    """

    def __init__(self, tracer: Tracer, call: ServerCall) -> None:
        self._call = call
        self._trace = trace_request(tracer, call.metadata, ROLE)
        self.metadata = with_trace(call.metadata, self._trace.headers)
        self._recorded = tracer.enabled
        self._first = True
        self._prompt_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> Self:
        """The call has begun."""
        return self

    def asking(self) -> None:
        """The request has been read; the engine is asked."""
        self._trace.enter(Phase.STREAM_WAIT)

    def accepted(self) -> None:
        """The engine has accepted it."""
        self._trace.enter(Phase.FIRST_TOKEN)

    def answered(self, answers: Sequence[GenerateResponse]) -> None:
        """The engine has answered."""
        if not self._recorded:
            return
        for answer in answers:
            if answer.prompt_info is not None:
                self._prompt_tokens = answer.prompt_info.num_prompt_tokens
            if answer.outputs is not None:
                self._output_tokens += answer.outputs.num_tokens
                if self._first:
                    self._first = False
                    self._trace.enter(Phase.STREAM)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The call is over."""
        reason, failure = self._end(error)
        self._trace.end(reason, failure=failure, prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens)

    def _end(self, error: BaseException | None) -> tuple[str, str]:
        if error is None:
            return "finished", ""
        if isinstance(error, CallGone):
            return "consumer_gone", ""
        if isinstance(error, AioCancelled):
            verdict = self._call.verdict
            return ("cancelled", "") if verdict is None else (VERDICTS.get(verdict, "error"), verdict.name)
        return "error", (error.status if isinstance(error, SidecarError) else StatusCode.INTERNAL).name
