"""Asking a front end, against canned answers."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.http import HttpAddress
from trio_sidecar.up import chat
from trio_sidecar.up.chat import Answer, AskFailed, ask, wait_for_answer, wait_for_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'


def reply(status: int, body: str) -> bytes:
    data = body.encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)


def delta(text: str, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': finish}]})}\n\n"


@asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[HttpAddress]:
    """Gives each connection the next answer, and the last one to all that follow."""
    queue = list(answers)

    async def handle(stream: trio.SocketStream) -> None:
        await stream.receive_some(1 << 16)
        await stream.send_all(queue.pop(0) if len(queue) > 1 else queue[0])

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, handle, listeners)
        yield HttpAddress("127.0.0.1", listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


def nowhere(_text: str) -> None:
    pass


async def asked(answer: bytes, on_text: Callable[[str], None] | None = None) -> Answer:
    """What becomes of a question that gets this answer; errors come without their group."""
    caught: AskFailed | None = None
    result = Answer()
    async with serving(answer) as address:
        try:
            result = await ask(address, "m", "q?", on_text or nowhere)
        except AskFailed as error:
            caught = error
    if caught is not None:
        raise caught
    return result


async def test_answer_is_handed_on_as_it_comes() -> None:
    """Each delta's text is passed on; reason and usage are kept for the end."""
    texts: list[str] = []
    body = ": comment\n\n" + delta("Hel") + delta("lo", "stop") + USAGE + "data: [DONE]\n\n"

    assert Answer(finish_reason="stop", completion_tokens=2) == await asked(reply(200, body), texts.append)
    assert ["Hel", "lo"] == texts


async def test_stream_may_end_without_done() -> None:
    """A stream whose finish reason came is whole."""
    assert Answer(finish_reason="length") == await asked(reply(200, delta("x", "length")))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(404, '{"error": {"message": "no model x"}}'), "HTTP 404: no model x"),
        (reply(400, '{"message": "bad", "type": "t"}'), "HTTP 400: bad"),
        (reply(500, "<html>oops"), "HTTP 500: <html>oops"),
        (reply(503, ""), "HTTP 503: no message"),
        (reply(200, delta("He") + 'data: {"error": {"message": "engine gone"}}\n\n'), "engine gone"),
        (reply(200, 'data: {"message": "engine gone"}\n\n'), "engine gone"),
        (reply(200, "data: {}\n\n"), "error without a message"),
        (reply(200, "data: <\n\n"), "no JSON object"),
        (reply(200, delta("He")), "the answer ended early"),
    ],
)
async def test_errors_carry_the_servers_message(answer: bytes, words: str) -> None:
    """Refused, failed in mid-stream, malformed or cut: each is an error that says so."""
    with pytest.raises(AskFailed, match=words):
        await asked(answer)


async def test_silence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that stalls is given up on after a time without any part of it."""
    monkeypatch.setattr(chat, "IDLE_SECONDS", 0.05)
    with pytest.raises(AskFailed, match=r"no part of the answer came for 0\.05 s"):
        await asked_of_a_mute()


async def asked_of_a_mute() -> None:
    async def handle(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        await trio.sleep_forever()

    caught: AskFailed | None = None
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(trio.serve_listeners, handle, listeners)
        try:
            await ask(HttpAddress("127.0.0.1", listeners[0].socket.getsockname()[1]), "m", "q?", nowhere)
        except AskFailed as error:
            caught = error
        nursery.cancel_scope.cancel()
    if caught is not None:
        raise caught


async def test_waiting_for_a_model_outlasts_what_is_not_ready() -> None:
    """No models, an error page or junk mean to ask again."""
    answers = [
        reply(200, '{"data": []}'),
        reply(500, "x"),
        reply(200, "junk"),
        b"",
        reply(200, '{"data": [{"id": "m"}]}'),
    ]
    with trio.fail_after(5):
        async with serving(*answers) as address:
            assert "m" == await wait_for_model(address)


async def test_waiting_for_an_answer_outlasts_what_is_not_ready() -> None:
    """A model may be listed before it can be reached; an answer ends the wait."""
    with trio.fail_after(5):
        async with serving(reply(503, "{}"), reply(404, "{}"), b"", reply(200, "{}")) as address:
            await wait_for_answer(address, "m")


async def test_waiting_for_an_answer_ends_at_a_real_error() -> None:
    """An error that waiting does not cure is told at once."""
    with trio.fail_after(5), pytest.RaisesGroup(pytest.RaisesExc(AskFailed, match="HTTP 400: bad")):
        async with serving(reply(503, "{}"), reply(400, '{"message": "bad"}')) as address:
            await wait_for_answer(address, "m")
