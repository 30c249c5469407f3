"""An engine that does what a script says, and remembers what was asked of it.

For tests of faces and of whatever sits on the engine contract::

    gate = Gate()
    engine = FakeEngine(Script(stream=[Send(tokens(7)), gate, Send(finish(8))]))
    ...  # the first token arrives; the second only after gate.open()
    assert engine.requests[0].released

All its time is the loop's, so it is virtual under Trio's autojump clock.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from trio_sidecar import wire
from trio_sidecar.bridge import AioEvent, aio_checkpoint, aio_now, aio_sleep
from trio_sidecar.errors import RpcError, StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from trio_sidecar.engines.contract import Req, Resp
    from trio_sidecar.wire.methods import Method

__all__ = ["Fail", "FakeEngine", "FakeStream", "Gate", "ReceivedRequest", "Script", "Send", "Wait", "finish", "tokens"]


@attrs.frozen(init=False)
class Send:
    """A step that hands over answers; several in one step arrive together."""

    responses: tuple[wire.GenerateResponse, ...]

    def __init__(self, *responses: wire.GenerateResponse) -> None:
        self.__attrs_init__(responses)


@attrs.frozen
class Wait:
    """A step that takes that many seconds."""

    seconds: float


@attrs.frozen
class Fail:
    """A step that raises."""

    error: Exception


class Gate:
    """A step that holds everything up until the test opens it."""

    def __init__(self) -> None:
        self._opened = AioEvent()

    def open(self) -> None:
        """Let every request past, now and later."""
        self._opened.set()

    async def aio_pass(self) -> None:
        """Wait until it is open."""
        await self._opened.aio_wait()


Step: TypeAlias = Send | Wait | Fail | Gate


@attrs.frozen(kw_only=True)
class Script:
    """What happens to one request.

    Attributes:
        opening: Steps before the engine accepts it; ``Send`` is not allowed here.
        stream: Steps after that; where they end, the stream ends with OK, terminal or not.
        closing: Steps that releasing the request takes, whatever the reason.
    """

    opening: Sequence[Step] = ()
    stream: Sequence[Step] = ()
    closing: Sequence[Step] = ()


@attrs.define(eq=False)
class ReceivedRequest:
    """What the engine saw of one request.

    Attributes:
        request: The message.
        metadata: What came beside it.
        opened: Whether it was accepted.
        reads: How often the face asked for answers.
        sent: How many answers were handed over.
        released: Whether the face let go of it; also true of one that failed to open.
        released_at: When, on the loop's clock.
    """

    request: wire.GenerateRequest
    metadata: Mapping[str, str]
    opened: bool = False
    reads: int = 0
    sent: int = 0
    released: bool = False
    released_at: float | None = None


class FakeStream:
    """The stream that a script plays; see :class:`~trio_sidecar.engines.contract.EngineStream`."""

    def __init__(self, steps: Sequence[Step], received: ReceivedRequest) -> None:
        self._steps = iter(steps)
        self._received = received

    async def aio_receive(self) -> Sequence[wire.GenerateResponse]:
        """Play steps up to the next ``Send``, or to the end of the script."""
        self._received.reads += 1
        await aio_checkpoint()
        for step in self._steps:
            if isinstance(step, Send):
                self._received.sent += len(step.responses)
                return step.responses
            await _aio_play(step)
        return ()


@attrs.define(eq=False)
class FakeEngine:
    """An :class:`~trio_sidecar.engines.contract.Engine` that plays a script per request.

    Attributes:
        script: The script of every request, or a function that picks one for a request.
        answers: What :meth:`aio_call` does, by method name: a message to return, an error to raise, or a function of
            the request. A call without an entry is answered UNIMPLEMENTED.
        health: Status by service name; one without an entry is NOT_FOUND.
        requests: Everything that was received, oldest first.
        calls: Every call: method name and request.
    """

    script: Script | Callable[[wire.GenerateRequest], Script] = attrs.field(factory=Script)
    answers: dict[str, Any] = attrs.field(factory=dict)
    health: dict[str, wire.HealthCheckResponseServingStatus] = attrs.field(factory=dict)
    requests: list[ReceivedRequest] = attrs.field(factory=list, init=False)
    calls: list[tuple[str, Any]] = attrs.field(factory=list, init=False)

    @property
    def open_streams(self) -> int:
        """Requests that were received and not released."""
        return sum(not request.released for request in self.requests)

    @asynccontextmanager
    async def aio_generate(
        self, request: wire.GenerateRequest, metadata: Mapping[str, str]
    ) -> AsyncIterator[FakeStream]:
        """Play the request's script."""
        script = self.script(request) if callable(self.script) else self.script
        received = ReceivedRequest(request, dict(metadata))
        self.requests.append(received)
        try:
            for step in script.opening:
                await _aio_play(step)
            received.opened = True
            yield FakeStream(script.stream, received)
        finally:
            for step in script.closing:
                await _aio_play(step)  # noqa: ASYNC102 - how long a release takes is the script's business
            received.released = True
            received.released_at = aio_now()

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Answer from ``answers``."""
        self.calls.append((method.name, request))
        answer = self.answers.get(method.name)
        if answer is None:
            raise RpcError(StatusCode.UNIMPLEMENTED, "not in this script", rpc=method.name)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, method.response), f"the answer to {method.name} must be a {method.response.__name__}"  # noqa: S101
        return answer

    async def aio_check_health(self, service: str) -> wire.HealthCheckResponseServingStatus:
        """Answer from ``health``."""
        if service not in self.health:
            raise RpcError(StatusCode.NOT_FOUND, f"unknown service {service!r}", rpc="Check")
        return self.health[service]


async def _aio_play(step: Step) -> None:
    match step:
        case Wait(seconds):
            await aio_sleep(seconds)
        case Fail(error):
            raise error
        case Gate():
            await step.aio_pass()
        case Send():
            reason = "Send belongs into a script's stream"
            raise ValueError(reason)


def tokens(*ids: int, text: str = "") -> wire.GenerateResponse:
    """An answer with these tokens."""
    output = wire.SequenceOutput(text=text, num_tokens=len(ids), token_ids=list(ids))
    return wire.GenerateResponse(outputs=output)


def finish(
    *ids: int,
    total: int | None = None,
    reason: wire.FinishInfoFinishReason = wire.FinishInfoFinishReason.LENGTH,
    text: str = "",
) -> wire.GenerateResponse:
    """A terminal answer, with these tokens.

    Args:
        ids: The tokens in it.
        total: Output tokens of the whole request; those in this answer unless given.
        reason: Why the engine stopped.
        text: The text of the tokens.
    """
    response = tokens(*ids, text=text)
    assert response.outputs is not None  # noqa: S101 - for the type checker
    response.outputs.finish_info = wire.FinishInfo(
        num_output_tokens=len(ids) if total is None else total, finish_reason=reason
    )
    return response
