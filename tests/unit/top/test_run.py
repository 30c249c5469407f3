"""The live view's life, over real sockets and a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import signal
import termios
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.config import TopSettings
from trio_sidecar.endpoint import HttpEndpoint
from trio_sidecar.metrics import ENGINE_FAMILIES, FamilyCollector, exposition
from trio_sidecar.observe.pages import NOT_FOUND, Page, serve_pages
from trio_sidecar.top.run import run_once, run_top

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FAST = TopSettings(interval_secs=0.05)
NOWHERE = HttpEndpoint.parse("http://127.0.0.1:1")


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[HttpEndpoint, list[str]]]:
    """A metrics port, whose token count grows by 5 with each look; and what was asked for."""
    asked: list[str] = []

    async def page(path: str) -> Page:  # noqa: ASYNC124 - serve_pages awaits it
        asked.append(path)
        reading = {"server_output_tokens": 5 * len(asked), "server_calls_in_flight": 2}
        text = exposition(FamilyCollector(ENGINE_FAMILIES, lambda: reading))
        return Page(200, text) if path == "/metrics" else NOT_FOUND

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(serve_pages, listeners, page)
        yield HttpEndpoint.parse(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"), asked
        nursery.cancel_scope.cancel()


@pytest.fixture
def terminal() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A terminal's two ends: where keys are pressed, and where they arrive."""
    keyboard, device = os.openpty()
    with os.fdopen(device, "r") as keys:
        yield keyboard, keys
    os.close(keyboard)


async def test_once() -> None:
    """Two looks, one interval apart, printed as they are; a target that does not answer costs the exit code."""
    async with engine() as (endpoint, asked):
        out = io.StringIO()
        with trio.fail_after(10):
            assert 0 == await run_once(FAST, [endpoint], out=out)
        assert ["/metrics"] * 2 == asked
        assert "2 in flight" in out.getvalue()
        assert "/s out" in out.getvalue()
        assert "\x1b" not in out.getvalue()
        with trio.fail_after(10):
            assert 1 == await run_once(FAST, [endpoint, NOWHERE], out=out)
        assert "cannot connect to 127.0.0.1:1" in out.getvalue()


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x1b"])
async def test_a_key_ends_it(terminal: tuple[int, io.TextIOWrapper], key: bytes) -> None:
    """It asks again and again, draws, ignores other keys, and leaves terminal and screen as they were."""
    keyboard, keys = terminal
    before = termios.tcgetattr(keys.fileno())
    out = io.StringIO()
    async with engine() as (endpoint, asked):
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(run_top, FAST, [endpoint, NOWHERE], out=out, keys=keys))
                while len(asked) < 4:  # noqa: ASYNC110 - over a real socket
                    await trio.sleep(0.01)
                os.write(keyboard, b"x")
                count = len(asked)
                while len(asked) < count + 2:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                os.write(keyboard, key)
    assert before == termios.tcgetattr(keys.fileno())


async def test_ctrl_c_ends_it(terminal: tuple[int, io.TextIOWrapper]) -> None:
    """Without an error, with or without a keyboard."""
    _, keys = terminal
    async with engine() as (endpoint, asked):
        for source in (keys, io.StringIO()):
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(run_top, FAST, [endpoint], out=io.StringIO(), keys=source))
                    count = len(asked)
                    while len(asked) < count + 2:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    signal.raise_signal(signal.SIGINT)
