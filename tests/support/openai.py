"""A small OpenAI client for tests: it keeps every chunk of a stream, so that tests can look at each."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT_SECONDS = 30
CHATTY = "say hello to the harbour"
DATA = "data: "


@attrs.frozen(slots=True)
class Answer:
    """A whole answer of either kind of endpoint."""

    status: int
    body: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        """The only choice."""
        assert self.status == httpx2.codes.OK, self.body
        (choice,) = self.body["choices"]
        return dict(choice)

    @property
    def text(self) -> str:
        """The generated text."""
        choice = self.choice
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def finish_reason(self) -> str:
        """Why the generation ended."""
        return str(self.choice["finish_reason"])

    @property
    def usage(self) -> tuple[int, int, int]:
        """Prompt, completion and total tokens."""
        usage = self.body["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]

    @property
    def error(self) -> str:
        """The message of a refusal."""
        assert self.status != httpx2.codes.OK, self.body
        return str(self.body["message"])


@attrs.frozen(slots=True)
class Streamed:
    """All chunks of a streamed answer."""

    chunks: list[dict[str, Any]]

    @property
    def deltas(self) -> list[str]:
        """The texts, one per chunk that has a choice."""
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices]

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.deltas)

    @property
    def finish_reasons(self) -> list[str]:
        """Every reason in the stream; there must be one."""
        reasons = [choice.get("finish_reason") for chunk in self.chunks for choice in chunk["choices"]]
        return [reason for reason in reasons if reason is not None]

    @property
    def usages(self) -> list[tuple[int, int, int]]:
        """Every usage in the stream: prompt, completion and total tokens."""
        found = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return [(one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) for one in found]


@attrs.frozen(slots=True)
class OpenAi:
    """A client of one front end that asks one model for one thing unless told otherwise."""

    url: str
    model: str
    prompt: list[int]
    http: httpx2.AsyncClient

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        """One request, one answer."""
        answer = await self.http.post(f"{self.url}{path}", json={"model": self.model} | body)
        return Answer(answer.status_code, answer.json())

    async def chat(self, content: str = CHATTY, **body: Any) -> Answer:
        """``/v1/chat/completions`` with one user message."""
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]} | body)

    async def complete(self, **body: Any) -> Answer:
        """``/v1/completions``."""
        return await self.post("/v1/completions", {"prompt": self.prompt} | body)

    async def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """One request, all chunks of its answer; the stream must end with ``[DONE]``."""
        body = {"model": self.model, "stream": True} | body
        answer = await self.http.post(f"{self.url}{path}", json=body)
        assert answer.status_code == httpx2.codes.OK, answer.text
        events = [line.removeprefix(DATA) for line in answer.text.splitlines() if line]
        assert events[-1:] == ["[DONE]"], events
        return Streamed([json.loads(event) for event in events[:-1]])

    async def stream_chat(self, content: str = CHATTY, **body: Any) -> Streamed:
        """:meth:`chat`, streamed."""
        return await self.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]} | body)

    async def stream_complete(self, **body: Any) -> Streamed:
        """:meth:`complete`, streamed."""
        return await self.stream("/v1/completions", {"prompt": self.prompt} | body)

    async def leave_after(self, path: str, body: dict[str, Any], *, events: int) -> dict[str, Any]:
        """Read so many events of a streamed answer, then close the connection, as a client that goes away does.

        Returns:
            The first event.
        """
        where = httpx2.URL(self.url)
        content = json.dumps({"model": self.model, "prompt": self.prompt, "stream": True} | body)
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc.decode()}\r\nContent-Type: application/json\r\n"
        with trio.fail_after(TIMEOUT_SECONDS):
            async with await trio.open_tcp_stream(where.host, where.port or 80) as connection:
                await connection.send_all(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
                received = b""
                while len(found := re.findall(rb"^data: (\{.*\})$", received, re.MULTILINE)) < events:
                    some = await connection.receive_some()
                    assert some, received.decode()
                    received += some
        first: dict[str, Any] = json.loads(found[0])
        return first


@contextlib.asynccontextmanager
async def open_client(url: str, model: str, prompt: list[int]) -> AsyncIterator[OpenAi]:
    """A client that ignores proxy variables and waits at most half a minute for anything."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, limits=limits) as http:
        yield OpenAi(url, model, prompt, http)
