"""Clients that ask for all kinds of things, and keep count of how each request ended."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import trio

from soak.service import MODEL
from support.openai import DATA

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from support.openai import OpenAi

LANES = 6
REQUEST_SECONDS = 60
PAUSE_SECONDS = 0.3
EXCUSE_SECONDS = 20.0
"""How long after a fault has ended an error is still due to it: the front end shuns a worker for some seconds."""

LONG_PROMPT = 4000
FIRST_ID = 300
WORDS = 4000


@attrs.define(eq=False)
class Load:
    """The clients.

    Attributes:
        ended: How many requests ended in which way.
        wrong: What must not be: a wrong answer, an end that is none, an error that no fault explains.
    """

    client: OpenAi
    random: random.Random
    ended: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    _open: int = 0
    _gate: trio.Event = attrs.field(factory=trio.Event)
    _faulty: bool = False
    _excused_until: float = 0.0

    @property
    def requests(self) -> int:
        """How many requests have ended."""
        return self.ended.total()

    def begin(self) -> None:
        """Ask."""
        self._gate.set()

    async def pause(self) -> None:
        """Ask for nothing more, and wait until everything is answered."""
        self._gate = trio.Event()
        with trio.fail_after(REQUEST_SECONDS):
            while self._open:  # noqa: ASYNC110 - a pause is rare
                await trio.sleep(0.05)

    def excuse(self, *, until_secs: float) -> None:
        """A fault has just begun, and will be over in so many seconds."""
        self._excused_until = max(self._excused_until, trio.current_time() + until_secs + EXCUSE_SECONDS)

    async def lane(self) -> None:
        """Ask one thing after another, until cancelled."""
        kinds: list[Callable[[], Awaitable[str]]] = [
            self._short,
            self._short,
            self._short,
            self._long,
            self._leave,
            self._long_prompt,
            self._chat,
        ]
        while True:
            await self._gate.wait()
            self._open += 1
            try:
                with trio.fail_after(REQUEST_SECONDS):
                    end = await self.random.choice(kinds)()
            except trio.TooSlowError:
                end = "hung"
            finally:
                self._open -= 1
            self.ended[end] += 1
            if end.startswith(("wrong", "hung")):
                self.wrong.append(f"{trio.current_time():.1f}: {end}")
            elif end == "error":
                if trio.current_time() > self._excused_until:
                    self.wrong.append(f"{trio.current_time():.1f}: an error that no fault explains")
                await trio.sleep(PAUSE_SECONDS)

    # -- Kinds of requests

    async def _short(self) -> str:
        count = self.random.randrange(1, 16)
        return await self._whole("/v1/completions", {"prompt": self._ids(20)}, count, "short")

    async def _long_prompt(self) -> str:
        return await self._whole("/v1/completions", {"prompt": self._ids(LONG_PROMPT)}, 4, "long prompt")

    async def _chat(self) -> str:
        body = {"messages": [{"role": "user", "content": f"number {self.random.random()}"}], "logprobs": True}
        return await self._whole("/v1/chat/completions", body | {"top_logprobs": 3}, 20, "chat")

    async def _whole(self, path: str, body: dict[str, Any], count: int, name: str) -> str:
        try:
            answer = await self.client.post(path, body | {"max_tokens": count, "ignore_eos": True})
        except (httpx2.TransportError, json.JSONDecodeError) as error:
            return f"wrong: {name}: {type(error).__name__}"
        if answer.status != httpx2.codes.OK:
            return "error"
        if answer.usage[1] != count or answer.finish_reason != "length":
            return f"wrong: {name}: {answer.usage}, {answer.finish_reason!r}, where {count} tokens were asked for"
        return name

    async def _long(self) -> str:
        count = self.random.randrange(100, 600)
        body = {"model": MODEL, "prompt": self._ids(20), "stream": True, "max_tokens": count, "ignore_eos": True}
        try:
            answer = await self.client.http.post(f"{self.client.url}/v1/completions", json=body)
        except httpx2.TransportError as error:
            return f"wrong: long: {type(error).__name__}"
        if answer.status_code != httpx2.codes.OK:
            return "error"
        events = [line.removeprefix(DATA) for line in answer.text.splitlines() if line.startswith(DATA)]
        if events[-1:] != ["[DONE]"]:
            return "wrong: long: no end"
        chunks = [json.loads(event) for event in events[:-1]]
        errors = sum("error" in chunk for chunk in chunks)
        finishes = sum(one.get("finish_reason") is not None for chunk in chunks for one in chunk.get("choices", ()))
        if errors + finishes != 1:
            return f"wrong: long: {errors} errors and {finishes} finish reasons"
        return "error" if errors else "long"

    async def _leave(self) -> str:
        events = self.random.randrange(1, 20)
        body = {"model": MODEL, "prompt": self._ids(20), "stream": True, "max_tokens": 2000, "ignore_eos": True}
        try:
            async with self.client.http.stream("POST", f"{self.client.url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    events -= line.startswith(DATA)
                    if '"error"' in line:
                        return "error"
                    if events == 0:
                        return "left"  # which closes the connection
        except httpx2.TransportError as error:
            return f"wrong: left: {type(error).__name__}"
        return "error" if answer.status_code != httpx2.codes.OK else "wrong: left: no end"

    def _ids(self, count: int) -> list[int]:
        return [self.random.randrange(FIRST_ID, WORDS) for _ in range(count)]
