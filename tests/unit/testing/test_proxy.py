"""The proxy and its faults: between streams in memory in virtual time, and once between real sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

from trio_sidecar.testing.proxy import Proxy, open_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Memory: TypeAlias = "trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]"

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


class Ends:
    """A client and a server with a proxy between them."""

    def __init__(self) -> None:
        self.proxy = Proxy(self._dial)
        self.client, near = memory_stream_pair()
        self._near: trio.abc.HalfCloseableStream = near
        self._far, self.server = memory_stream_pair()

    async def _dial(self) -> Memory:
        return self._far

    @asynccontextmanager
    async def carried(self) -> AsyncIterator[Proxy]:
        """Carry while the block runs, which ends the connection."""
        with trio.fail_after(100_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.proxy.carry, self._near)
                await trio.testing.wait_all_tasks_blocked()
                yield self.proxy
                nursery.cancel_scope.cancel()


async def receive(stream: Memory, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size:
        some = await stream.receive_some(size - len(data))
        assert some, data
        data += some
    return data


async def nothing_comes(stream: Memory, seconds: float) -> bool:
    """Whether the stream stays silent, and open, for so long."""
    with trio.move_on_after(seconds):
        await stream.receive_some()
        return False
    return True


async def is_reset(stream: Memory) -> bool:
    """Whether the stream is over, and not with a stall."""
    with trio.fail_after(1):
        try:
            return await stream.receive_some() == b""
        except BROKEN:
            return True


async def test_bytes_go_both_ways(autojump_clock: object) -> None:
    """Without faults everything arrives, and it is counted."""
    ends = Ends()
    async with ends.carried() as proxy:
        await ends.client.send_all(b"question")
        assert b"question" == await receive(ends.server, 8)
        await ends.server.send_all(b"the answer")
        assert b"the answer" == await receive(ends.client, 10)
        (link,) = proxy.links
        assert (8, 10) == (link.up_bytes, link.down_bytes)
        assert (8, 10) == (proxy.up.passed_bytes, proxy.down.passed_bytes)
    assert ([], 1) == (proxy.links, proxy.carried)


async def test_an_end_of_input_passes(autojump_clock: object) -> None:
    """One side may end first, and still gets the answer; then the connection is over, in an orderly way."""
    ends = Ends()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.proxy.carry, ends._near)
            await ends.client.send_all(b"question")
            await ends.client.send_eof()
            assert b"question" == await receive(ends.server, 8)
            assert await ends.server.receive_some() == b""
            await ends.server.send_all(b"answer")
            await ends.server.aclose()
            assert b"answer" == await receive(ends.client, 6)
            assert await ends.client.receive_some() == b""
    assert [] == ends.proxy.links


async def test_a_delay_in_one_direction(autojump_clock: object) -> None:
    """Everything arrives that much later, however much is on its way, and the other direction is not delayed."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.down.delay_secs = 5.0
        start = trio.current_time()
        for piece in (b"one", b"two"):
            await ends.server.send_all(piece)
            await trio.sleep(1)
        await ends.client.send_all(b"up")
        assert b"up" == await receive(ends.server, 2)
        assert 2.0 == pytest.approx(trio.current_time() - start)
        assert b"one" == await receive(ends.client, 3)
        assert 5.0 == pytest.approx(trio.current_time() - start)
        assert b"two" == await receive(ends.client, 3)
        assert 6.0 == pytest.approx(trio.current_time() - start)


async def test_a_jitter_keeps_the_order(autojump_clock: object) -> None:
    """Each piece takes a time of its own, and none overtakes another."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.up.piece_bytes = 1
        proxy.up.jitter_secs = 3.0
        start = trio.current_time()
        await ends.client.send_all(bytes(range(50)))
        assert bytes(range(50)) == await receive(ends.server, 50)
        assert 2.0 < trio.current_time() - start < 3.0


async def test_a_cut_after_some_bytes(autojump_clock: object) -> None:
    """What is below the limit arrives, in whatever pieces, and then both ends are reset."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.down.cut_after_bytes = 10
        await ends.server.send_all(b"0123456")
        assert b"0123456" == await receive(ends.client, 7)
        await ends.server.send_all(b"789abc")
        assert b"789" == await receive(ends.client, 3)
        assert await is_reset(ends.client)
        assert await is_reset(ends.server)
        assert [] == proxy.links


async def test_a_cut_on_command(autojump_clock: object) -> None:
    """Both ends are reset, also while everything is stalled."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.stall()
        await ends.server.send_all(b"lost")
        await trio.testing.wait_all_tasks_blocked()
        proxy.cut()
        assert await is_reset(ends.client)
        assert await is_reset(ends.server)


async def test_a_stall_and_its_end(autojump_clock: object) -> None:
    """Nothing gets through for an hour, in that direction, and afterwards all of it does."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.down.stall()
        await ends.server.send_all(b"late")
        assert await nothing_comes(ends.client, 3600)
        await ends.client.send_all(b"up")
        assert b"up" == await receive(ends.server, 2)
        proxy.go_on()
        assert b"late" == await receive(ends.client, 4)


async def test_a_slow_way_holds_the_sender_back(autojump_clock: object) -> None:
    """What is under way is bounded, so that a sender notices that nobody reads."""
    ends = Ends()
    client, ends._near = lockstep_stream_pair()
    ends.proxy.up.delay_secs = 1000.0
    ends.proxy.up.piece_bytes = 1
    async with ends.carried():
        with trio.move_on_after(999) as limit:
            await client.send_all(bytes(500))
        assert limit.cancelled_caught


async def test_a_half_open_connection(autojump_clock: object) -> None:
    """The server is rid of it; the client may send, and hears nothing until it gives up."""
    ends = Ends()
    async with ends.carried() as proxy:
        proxy.half_open()
        assert await is_reset(ends.server)
        await ends.client.send_all(b"is anybody there")
        assert await nothing_comes(ends.client, 3600)
        await ends.client.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert [] == proxy.links


async def test_an_ignored_connection(autojump_clock: object) -> None:
    """It is made, and nothing comes of it, also when others are carried again."""
    ends = Ends()
    ends.proxy.ignore()
    async with ends.carried() as proxy:
        proxy.go_on()
        await ends.client.send_all(b"hello")
        assert await nothing_comes(ends.client, 3600)
        assert await nothing_comes(ends.server, 1)
        await ends.client.aclose()


async def test_a_target_that_is_not_there(autojump_clock: object) -> None:
    """The client is reset, and the proxy goes on."""

    async def dial() -> Memory:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError

    client, near = memory_stream_pair()
    proxy = Proxy(dial)
    await proxy.carry(near)
    assert await is_reset(client)


async def test_one_end_that_breaks(autojump_clock: object) -> None:
    """If one end is lost the other is reset."""
    ends = Ends()
    async with ends.carried() as proxy:
        await trio.aclose_forcefully(ends.server)
        await ends.client.send_all(b"anybody")
        assert await is_reset(ends.client)
        await trio.testing.wait_all_tasks_blocked()
        assert [] == proxy.links


async def refused(port: int) -> bool:
    """Whether a connection cannot be made."""
    try:
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    except OSError:
        return True
    return False


async def test_over_sockets() -> None:
    """It listens, carries, resets for real, refuses for real, and listens on the same port again."""

    async def echo(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in stream:
                await stream.send_all(data)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, echo, [listener])
            async with open_proxy("127.0.0.1", listener.socket.getsockname()[1]) as proxy:
                for _ in range(2):
                    client = await trio.open_tcp_stream("127.0.0.1", proxy.port)
                    await client.send_all(b"hello")
                    assert b"hello" == await client.receive_some()
                    proxy.refuse()
                    while not await refused(proxy.port):  # noqa: ASYNC110 - the kernel decides
                        await trio.sleep(0.01)
                    await client.send_all(b"still")
                    assert b"still" == await client.receive_some()
                    proxy.cut()
                    with pytest.raises(trio.BrokenResourceError):
                        await client.receive_some()
                    await client.aclose()
                    proxy.go_on()
                    while await refused(proxy.port):  # noqa: ASYNC110
                        await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
