"""Asking a front end: which models it has, whether it answers yet, and one question with the answer as it comes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_sidecar.errors import SidecarError
from trio_sidecar.http import HttpAddress, HttpFailed, open_exchange

if TYPE_CHECKING:
    from collections.abc import Callable

OK = 200
UNAVAILABLE = 503
NOT_FOUND = 404
POLL_SECONDS = 0.05
IDLE_SECONDS = 60.0


class AskFailed(SidecarError):
    """The front end answered with an error; the message is its own."""


@attrs.frozen(slots=True, kw_only=True)
class Answer:
    """How an answer ended.

    Attributes:
        finish_reason: As OpenAI's API words it.
        completion_tokens: Their number, if the front end reported it.
    """

    finish_reason: str | None = None
    completion_tokens: int | None = None


async def wait_for_model(address: HttpAddress) -> str:
    """Wait until the front end lists a model; returns the first one's id."""
    while True:
        try:
            async with open_exchange(address, "GET", "/v1/models") as exchange:
                if exchange.status == OK:
                    names = [str(entry["id"]) for entry in json.loads(await exchange.read_all())["data"]]
                    if names:
                        return names[0]
        except (HttpFailed, ValueError, KeyError, TypeError):
            pass  # not there yet; the caller's deadline ends this
        await trio.sleep(POLL_SECONDS)


async def wait_for_answer(address: HttpAddress, model: str) -> None:
    """Wait until a one-token question is answered: a model may be listed a moment before it can be reached.

    Raises:
        AskFailed: An error that waiting does not cure.
    """
    body = _chat_body(model, "ping", stream=False, max_tokens=1)
    while True:
        try:
            async with open_exchange(address, "POST", "/v1/chat/completions", body) as exchange:
                if exchange.status == OK:
                    return
                if exchange.status not in (UNAVAILABLE, NOT_FOUND):
                    raise AskFailed(_error_text(exchange.status, await exchange.read_all()))
        except HttpFailed:
            pass
        await trio.sleep(POLL_SECONDS)


async def ask(address: HttpAddress, model: str, question: str, on_text: Callable[[str], None]) -> Answer:
    """Put one question; the answer's text is handed on as it comes.

    Raises:
        AskFailed: The front end refused, the stream carried an error, or it ended early.
        HttpFailed: The connection broke.
    """
    body = _chat_body(model, question, stream=True)
    async with open_exchange(address, "POST", "/v1/chat/completions", body) as exchange:
        if exchange.status != OK:
            raise AskFailed(_error_text(exchange.status, await exchange.read_all()))
        answer, rest = Answer(), b""
        while True:
            with trio.move_on_after(IDLE_SECONDS) as idle:
                piece = await exchange.read_some()
            if idle.cancelled_caught:
                msg = f"no part of the answer came for {IDLE_SECONDS:g} s"
                raise AskFailed(msg)
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return answer
                if line.startswith(b"data:"):
                    answer = _take_event(data, answer, on_text)
            if not piece:
                if answer.finish_reason:
                    return answer
                msg = "the answer ended early"
                raise AskFailed(msg)


def _chat_body(model: str, content: str, *, stream: bool, max_tokens: int | None = None) -> bytes:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return json.dumps(body).encode()


def _take_event(data: bytes, answer: Answer, on_text: Callable[[str], None]) -> Answer:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        msg = "the front end sent an event that is no JSON object"
        raise AskFailed(msg)
    if event.get("error") or "choices" not in event:
        raise AskFailed(_error_message(event) or "the front end reported an error without a message")
    for choice in event["choices"]:
        text = (choice.get("delta") or {}).get("content")
        if text:
            on_text(text)
        if choice.get("finish_reason"):
            answer = attrs.evolve(answer, finish_reason=str(choice["finish_reason"]))
    if event.get("usage"):
        answer = attrs.evolve(answer, completion_tokens=event["usage"].get("completion_tokens"))
    return answer


def _error_text(status: int, body: bytes) -> str:
    try:
        message = _error_message(json.loads(body))
    except ValueError:
        message = body[:500].decode(errors="replace").strip()
    return f"HTTP {status}: {message or 'no message'}"


def _error_message(value: object) -> str:
    """The message inside the shapes in which servers report errors."""
    if isinstance(value, dict):
        inner = value.get("error") or value.get("message") or ""
        return _error_message(inner)
    return str(value) if value else ""
