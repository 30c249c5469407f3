"""A target is asked, and what it answers is read; over real sockets on this machine."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.endpoint import HttpEndpoint
from trio_sidecar.top.scrape import ScrapeFailed, parse, scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


TEXT = """# HELP x What it is.
# TYPE x counter
x_total{reason="a"} 1
x_total{reason="b",role="agg"} 2
# TYPE g gauge
g 7.5
"""


@asynccontextmanager
async def answering(status: str, body: str, *, silent: bool = False) -> AsyncIterator[tuple[HttpEndpoint, list[bytes]]]:
    """A server with one answer; its URL, and the requests that it got."""
    requests: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        requests.append(bytes(await stream.receive_some(4096)))
        if silent:
            await trio.sleep_forever()
        data = body.encode()
        await stream.send_all(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])  # noqa: ASYNC113 - it listens already
        port = listener.socket.getsockname()[1]
        yield HttpEndpoint.parse(f"http://127.0.0.1:{port}"), requests
        nursery.cancel_scope.cancel()


async def test_metrics_are_read() -> None:
    """The path is the usual one unless the URL has one; the time is that of the question."""
    async with answering("200 OK", TEXT) as (target, requests):
        before = trio.current_time()
        sample = await scrape(target, 5)
    assert requests[0].startswith(b"GET /metrics HTTP/1.1\r\n")
    assert before <= sample.at <= trio.current_time()
    assert 3 == sample.total("x_total")
    assert 2 == sample.total("x_total", role="agg")
    assert None is sample.total("x_total", reason="c")
    assert {"a": 1, "b": 2} == sample.by("x_total", "reason")
    assert {"": 7.5} == sample.by("g", "reason")
    assert {} == sample.by("y", "reason")


async def test_a_path_of_its_own() -> None:
    """A URL with a path is asked for that."""
    async with answering("200 OK", TEXT) as (target, requests):
        await scrape(HttpEndpoint.parse(f"{target}vllm/metrics"), 5)
    assert requests[0].startswith(b"GET /vllm/metrics HTTP/1.1\r\n")


async def test_what_is_no_answer() -> None:
    """Another status, text in another format, and nobody there: one line each."""
    async with answering("404 Not Found", "") as (target, _):
        with pytest.raises(ScrapeFailed, match="/metrics answered with HTTP status 404"):
            await scrape(target, 5)
    async with answering("200 OK", "<html>\n") as (target, _):
        with pytest.raises(ScrapeFailed, match="not in Prometheus' text format"):
            await scrape(target, 5)
    with pytest.raises(ScrapeFailed, match=r"cannot connect to 127\.0\.0\.1"):
        await scrape(target, 5)


async def test_a_silent_target_costs_its_time_only() -> None:
    """Who accepts and says nothing is given up."""
    async with answering("200 OK", "", silent=True) as (target, _):
        with pytest.raises(ScrapeFailed, match=r"no answer within 0\.05 s"):
            await scrape(target, 0.05)


def test_a_text_that_is_cut_off() -> None:
    """Half a line is no metric."""
    with pytest.raises(ScrapeFailed):
        parse('x_total{reason="a', 0.0)
