"""One generation of the mock engine: its pace and its end (asyncio-flavoured).

Tokens are made when they are read, not when they are due, so a request costs no memory for what nobody reads and needs
no task of its own. The pace is an absolute schedule: token *n* is due ``ttft + n * itl`` after the request began to
run, however late the earlier ones were read, so the pace does not drift and a stalled reader catches up in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from trio_sidecar.bridge import aio_checkpoint, aio_now
from trio_sidecar.bridge.alarm import AioAlarm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from trio_sidecar.engines.mock import MockEngine
    from trio_sidecar.engines.mock_output import MockOutput
    from trio_sidecar.errors import RpcError
    from trio_sidecar.wire import GenerateRequest, GenerateResponse

__all__ = ["MAX_ANSWERS_PER_RECEIVE", "MockStream"]

LONG_PROMPT = 8192
"""From so many ids on, the work on a prompt is cut into steps, for the others on the loop."""

MAX_ANSWERS_PER_RECEIVE = 64
"""How many answers one receive returns at most, so that a flood shares the loop."""

TIMER_SLACK_SECS = 0.001
"""uvloop's clock counts milliseconds, and a timer may fire half of one early; the next token then counts as due."""


class MockStream:
    """One generation of the mock engine: the async context manager and the stream in one.

    Attributes:
        request_id: The caller's, or the one the engine made, once entered.
    """

    def __init__(self, engine: MockEngine, request: GenerateRequest, metadata: Mapping[str, str]) -> None:
        self.request = request
        self.metadata = metadata
        self.request_id = request.request_id
        self._engine = engine
        self._alarm = AioAlarm()
        self._output: MockOutput | None = None
        self._first_due: float | None = None
        self._frozen_at: float | None = None
        self._prompt_info_sent = False
        self._aborted = False
        self._failure: RpcError | None = None

    async def __aenter__(self) -> Self:
        """Have the request accepted, or refused with an RpcError."""
        if self.request.token_ids is not None and len(self.request.token_ids.ids) > LONG_PROMPT:
            await aio_checkpoint()  # whoever called us has just decoded it
        self._output = self._engine.admit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all that the engine holds for the request."""
        self._engine.release(self)

    @property
    def end_reason(self) -> str:
        """Why it has ended, or ``dropped`` if it is left before its end."""
        if self._failure is not None:
            return "failed"
        if self._aborted:
            return "aborted"
        return "finished" if self._output is not None and self._output.is_finished() else "dropped"

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Wait for answers, then take all that are due; see the contract."""
        output = self._entered()
        if output.is_finished():
            return ()
        if self._due(output) > 0:
            # Without this a reader that is always served at once would keep the loop to itself.
            await aio_checkpoint()
        while True:
            if self._failure is not None:
                raise self._failure
            if self._aborted:
                return self._last_words(output)
            due = self._due(output)
            if due > 0:
                break
            await self._alarm.aio_wait_until(self._next_due(output))
        answers = [] if self._prompt_info_sent else [self._take_prompt_info(output)]
        for _ in range(min(due, MAX_ANSWERS_PER_RECEIVE)):
            answers.append(output.step())
            if output.is_finished():
                self._done()
                break
        return answers

    def start(self, now: float) -> None:
        """Begin to run: the clock of this stream starts (for the engine only)."""
        self._first_due = now + self._engine.facts.ttft_secs
        self._alarm.ring()

    def freeze(self, now: float) -> None:
        """Stand still (for the engine only)."""
        if self._frozen_at is None:
            self._frozen_at = now
            self._alarm.ring()

    def thaw(self, now: float) -> None:
        """Go on as if no time had passed (for the engine only)."""
        if self._frozen_at is not None and self._first_due is not None:
            self._first_due += now - self._frozen_at
        self._frozen_at = None
        self._alarm.ring()

    def abort(self) -> bool:
        """End with an ABORTED answer; whether that changed anything (for the engine only)."""
        if self._aborted or (self._output is not None and self._output.is_finished()):
            return False
        self._aborted = True
        self._done()
        self._alarm.ring()
        return True

    def fail(self, error: RpcError) -> None:
        """End with an error (for the engine only)."""
        if self._failure is None:
            self._failure = error
            self._done()
            self._alarm.ring()

    def _due(self, output: MockOutput) -> int:
        """How many tokens are due and not made."""
        if self._first_due is None or self._frozen_at is not None:
            return 0
        late = aio_now() - self._first_due + TIMER_SLACK_SECS
        interval = self._engine.facts.itl_secs
        if late < 0.0:
            return 0
        if interval <= 0.0:
            return MAX_ANSWERS_PER_RECEIVE
        return int(late / interval) + 1 - output.num_tokens

    def _next_due(self, output: MockOutput) -> float | None:
        """When the next token is due; None while the stream waits for its turn, or stands still."""
        if self._first_due is None or self._frozen_at is not None:
            return None
        return self._first_due + output.num_tokens * self._engine.facts.itl_secs

    def _take_prompt_info(self, output: MockOutput) -> GenerateResponse:
        self._prompt_info_sent = True
        return output.prompt_info()

    def _last_words(self, output: MockOutput) -> list[GenerateResponse]:
        answers = [] if self._prompt_info_sent else [self._take_prompt_info(output)]
        answers.append(output.aborted())
        return answers

    def _done(self) -> None:
        """The work has ended; the place is free even before the reader leaves."""
        self._engine.release(self)

    def _entered(self) -> MockOutput:
        if self._output is None:
            reason = "the stream was not entered"
            raise RuntimeError(reason)
        return self._output
