"""Cancelling a decode request, in virtual time: the transferred KV blocks must be released first (spec 10.2)."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import ModelFacts, convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.deadline import Deadline
from trio_sidecar.errors import EngineShutdown, ErrorKind, InvalidRequest, RpcError, SidecarError, StatusCode
from trio_sidecar.requests.cancel import cancel_policy
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens
from trio_sidecar.wire import FinishInfoFinishReason, GenerateResponse, PromptInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_sidecar.convert.request import ConvertedRequest
    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.requests.session import Session
    from trio_sidecar.testing.fake_engine import ReceivedRequest

REQUEST: dict[str, object] = {
    "model": "served-model",
    "token_ids": [11, 22, 33],
    "prefill_result": {"disaggregated_params": {"do_remote_prefill": True}},
}
MODEL = ModelFacts(served_model_name="served-model", mode=DisaggregationMode.DECODE)
SHORT = 0.05
"""Seconds after which whatever was going to happen has happened."""


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    return convert_request(request, request_id=request_id, model=MODEL)


@attrs.define(eq=False)
class Decode:
    """One decode request and its consumer, which takes chunks until the end."""

    session: Session
    engine: FakeEngine
    announced: list[float]
    chunks: list[Chunk] = attrs.field(factory=list)
    error: SidecarError | None = None

    async def take(self) -> None:
        await run_aio(self._aio_take)

    async def _aio_take(self) -> None:
        try:
            while (chunk := await self.session.aio_next()) is not None:
                self.chunks.append(chunk)
        except SidecarError as error:
            self.error = error

    @property
    def received(self) -> ReceivedRequest:
        return self.engine.requests[0]

    @property
    def ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk["token_ids"]]

    @property
    def terminals(self) -> list[str]:
        return [chunk["finish_reason"] for chunk in self.chunks if "finish_reason" in chunk]

    @property
    def completion_tokens(self) -> int:
        usage = self.chunks[-1]["completion_usage"]
        assert (3, 3 + usage["completion_tokens"]) == (usage["prompt_tokens"], usage["total_tokens"])
        return usage["completion_tokens"]


@attrs.define(eq=False)
class Worker:
    """A decode worker before a scripted engine."""

    engine: FakeEngine
    sessions: Sessions
    nursery: trio.Nursery

    def open(self) -> Decode:
        announced: list[float] = []
        policy = cancel_policy(DisaggregationMode.DECODE, lambda: announced.append(trio.current_time()))
        decode = Decode(self.sessions.open(REQUEST, "r", policy=policy), self.engine, announced)
        self.nursery.start_soon(decode.take)
        return decode


@asynccontextmanager
async def decode_worker(script: Script) -> AsyncIterator[Worker]:
    engine = FakeEngine(script)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks, role="decode")
    async with trio.open_nursery() as nursery, sessions.serving(engine, convert):
        yield Worker(engine, sessions, nursery)
    assert 0 == engine.open_streams
    assert 0 == sessions.statistics().open


@pytest.mark.rule("R10.5", "R10.6", "R10.7", "R10.8", "R10.13")
async def test_headers_and_the_first_token_are_waited_for(aio_loop: object, autojump_clock: object) -> None:
    """A cancel before the response headers waits for them, then for the first token, and only then ends the request."""
    headers, token = Gate(), Gate()
    async with decode_worker(Script(opening=(headers,), stream=(token, Send(tokens(42)), Wait(1000)))) as worker:
        decode = worker.open()
        await trio.sleep(SHORT)
        decode.session.cancel()
        await trio.sleep(SHORT)
        assert ([], False, False) == (decode.chunks, decode.received.opened, decode.received.released)
        headers.open()
        await trio.sleep(SHORT)
        assert ([], True, False) == (decode.chunks, decode.received.opened, decode.received.released)
        assert [] == decode.announced
        token.open()
        await trio.sleep(SHORT)
        assert ([], ["cancelled"], 1) == (decode.ids, decode.terminals, decode.completion_tokens)
        assert decode.received.released
        assert 1 == len(decode.announced)
    assert {"cancelled": 1} == worker.sessions.statistics().ended


@pytest.mark.rule("R10.5")
async def test_a_cancel_before_submission_does_not_stop_it(aio_loop: object, autojump_clock: object) -> None:
    """A request that is cancelled at once is submitted all the same, so that the engine fetches and releases."""
    async with decode_worker(Script(stream=(Wait(1), Send(tokens(42)), Wait(1000)))) as worker:
        decode = worker.open()
        decode.session.cancel()
        decode.session.cancel()
        await trio.sleep(0.5)
        assert ([], True, False) == (decode.chunks, decode.received.opened, decode.received.released)
        await trio.sleep(1)
        assert (["cancelled"], 1) == (decode.terminals, decode.completion_tokens)
        assert decode.received.released


@pytest.mark.rule("R10.6", "R10.7")
@pytest.mark.parametrize(
    "reason", [FinishInfoFinishReason.ABORTED, FinishInfoFinishReason.STOP], ids=lambda reason: reason.name
)
async def test_an_end_without_tokens(aio_loop: object, autojump_clock: object, reason: FinishInfoFinishReason) -> None:
    """The engine's end without a token lets the cancel act as well, but is not announced as a first token."""
    async with decode_worker(Script(stream=(Wait(1), Send(finish(total=0, reason=reason))))) as worker:
        decode = worker.open()
        decode.session.cancel()
        await trio.sleep(2)
        assert (["cancelled"], 0, []) == (decode.terminals, decode.completion_tokens, decode.announced)
        assert decode.received.released


@pytest.mark.rule("R10.6", "R10.8")
async def test_a_first_frame_with_tokens_and_the_end(aio_loop: object, autojump_clock: object) -> None:
    """Whatever the first frame holds, none of it is delivered and all of it is counted."""
    async with decode_worker(Script(stream=(Wait(1), Send(finish(42, 43))))) as worker:
        decode = worker.open()
        decode.session.cancel()
        await trio.sleep(2)
        assert ([], ["cancelled"], 2) == (decode.ids, decode.terminals, decode.completion_tokens)
        assert 1 == len(decode.announced)
        assert None is decode.error


@pytest.mark.rule("R10.9")
async def test_frames_without_tokens_are_not_enough(aio_loop: object, autojump_clock: object) -> None:
    """Prompt info, empty messages and empty outputs leave the cancel waiting."""
    prompt = GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=3))
    steps = (Send(prompt), Wait(1), Send(GenerateResponse()), Wait(1), Send(tokens()), Wait(1), Send(tokens(42)))
    async with decode_worker(Script(stream=(*steps, Wait(1000)))) as worker:
        decode = worker.open()
        decode.session.cancel()
        await trio.sleep(2.5)
        assert ([], False) == (decode.chunks, decode.received.released)
        await trio.sleep(1)
        assert (["cancelled"], 1) == (decode.terminals, decode.completion_tokens)
        assert decode.received.released


@pytest.mark.rule("R10.10")
@pytest.mark.parametrize(
    "script",
    [
        Script(opening=(Wait(1), Fail(RpcError(StatusCode.UNAVAILABLE, "gone")))),
        Script(stream=(Wait(1), Fail(RpcError(StatusCode.INTERNAL, "broken")))),
        Script(stream=(Wait(1),)),
        Script(stream=(Wait(1), Send(GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=4))))),
    ],
    ids=["refused", "failed", "early end", "invalid"],
)
async def test_failures_while_waiting(aio_loop: object, autojump_clock: object, script: Script) -> None:
    """A failure while a cancel waits ends the request as cancelled, with a warning and without an error."""
    with structlog.testing.capture_logs() as logs:
        async with decode_worker(script) as worker:
            decode = worker.open()
            decode.session.cancel()
            await trio.sleep(2)
            assert (["cancelled"], 0, None) == (decode.terminals, decode.completion_tokens, decode.error)
            assert [] == decode.announced
    assert ["engine_failed_after_cancel"] == [entry["event"] for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.rule("R10.10")
async def test_the_same_failure_without_a_cancel_is_an_error(aio_loop: object, autojump_clock: object) -> None:
    """Nobody who did not cancel is told that they did."""
    async with decode_worker(Script(stream=(Wait(1), Fail(RpcError(StatusCode.UNAVAILABLE, "gone"))))) as worker:
        decode = worker.open()
        await trio.sleep(2)
        assert [] == decode.terminals
        assert decode.error is not None
        assert ErrorKind.CANNOT_CONNECT is decode.error.kind


@pytest.mark.rule("R10.11")
async def test_after_the_first_token_a_cancel_acts_at_once(aio_loop: object, autojump_clock: object) -> None:
    """Once the first token was seen a decode is cancelled like any other request, and usage counts what was taken."""
    async with decode_worker(Script(stream=(Send(tokens(42)), Wait(1), Send(tokens(43)), Wait(1000)))) as worker:
        decode = worker.open()
        await trio.sleep(1.5)
        assert [42, 43] == decode.ids
        assert 1 == len(decode.announced)
        decode.session.cancel()
        await trio.sleep(SHORT)
        assert ([42, 43], ["cancelled"], 2) == (decode.ids, decode.terminals, decode.completion_tokens)
        assert decode.received.released


@pytest.mark.rule("R10.7")
async def test_the_first_token_is_announced_before_it_is_delivered(aio_loop: object, autojump_clock: object) -> None:
    """A request that nobody cancels announces its first token once and goes on."""
    async with decode_worker(Script(stream=(Wait(1), Send(tokens(42)), Wait(1), Send(finish(43, total=2))))) as worker:
        decode = worker.open()
        await trio.sleep(3)
        assert ([42, 43], ["length"]) == (decode.ids, decode.terminals)
        assert 1 == len(decode.announced)


@pytest.mark.rule("R10.2", "R10.12")
@pytest.mark.parametrize(
    "script",
    [Script(opening=(Wait(1000),)), Script(stream=(Wait(1000),)), Script(stream=(Send(tokens(42)), Wait(1000)))],
    ids=["submission", "first token", "reading"],
)
@pytest.mark.parametrize("cancelled", [False, True], ids=["running", "cancelled"])
async def test_shutdown_does_not_wait(
    aio_loop: object, autojump_clock: object, script: Script, cancelled: bool
) -> None:
    """The end of the worker interrupts a decode at any point, whether or not a cancel was waiting."""
    async with decode_worker(script) as worker:
        decode = worker.open()
        if cancelled:
            decode.session.cancel()
        await trio.sleep(SHORT)
        worker.sessions.cancel_all()
        await trio.sleep(SHORT)
        assert ["cancelled"] == decode.terminals
        assert decode.received.released


@pytest.mark.rule("R10.12")
async def test_the_drain_waits_for_a_held_back_cancel(aio_loop: object, autojump_clock: object) -> None:
    """Within its budget the drain lets a waiting cancel finish; past it the request is ended with an error."""
    async with decode_worker(Script(stream=(Wait(5), Send(tokens(42)), Wait(1000)))) as worker:
        decode = worker.open()
        decode.session.cancel()
        assert 0 == await worker.sessions.drain(Deadline.after(10))
        assert (["cancelled"], 1) == (decode.terminals, decode.completion_tokens)
        late = worker.open()
        late.session.cancel()
        assert 1 == await worker.sessions.drain(Deadline.after(2))
        await trio.sleep(SHORT)
        assert isinstance(late.error, EngineShutdown)


@pytest.mark.rule("R10.1", "R7.33")
async def test_a_bad_request_is_refused_before_a_cancel_counts(aio_loop: object, autojump_clock: object) -> None:
    """Without a handoff there is nothing to release, and the caller learns why."""
    async with decode_worker(Script()) as worker:
        with pytest.raises(InvalidRequest, match="prefill_result"):
            worker.sessions.open({**REQUEST, "prefill_result": None}, "r")
        assert [] == worker.engine.requests
        await trio.lowlevel.checkpoint()
