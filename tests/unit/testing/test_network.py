"""The network in memory, and its faults, between two protocols that only take notes."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.bridge.virtual import run_virtual
from trio_sidecar.testing.network import Answer, Link, Network


@attrs.define(eq=False)
class Notes:
    """A protocol that remembers."""

    transport: Any = None
    data: bytes = b""
    pieces: int = 0
    events: list[str] = attrs.field(factory=list)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append("lost" if error is None else type(error).__name__)

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


def play(scenario: Any, **options: Any) -> None:
    """Run a scenario with a network, a link and both its ends."""

    async def main() -> None:
        network = Network(random.Random(1), **options)
        network.listen("peer", 1, Notes)
        with network.installed():
            loop: Any = current_loop()

            async def aio_dial() -> Any:
                return await loop.create_connection(Notes, "peer", 1)

            with trio.fail_after(60):
                _, client = await run_aio(aio_dial)
            (link,) = network.links
            await scenario(network, link, client, link.server.protocol)

    run_virtual(main, random=random.Random(1))


def test_bytes_arrive_in_order_and_in_pieces() -> None:
    """All bytes arrive, cut anew, and not at once."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        sent = bytes(range(200))
        client.transport.write(sent)
        assert server.data == b""
        await trio.sleep(1)
        assert sent == server.data
        assert server.pieces > 1

    play(scenario, cut_probability=0.9)


def test_an_end_comes_after_the_bytes_before_it() -> None:
    """Closing sends what was written; then both ends hear of it."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        server.transport.write(b"last words")
        server.transport.close()
        server.transport.write(b"too late")
        await trio.sleep(1)
        assert b"last words" == client.data
        assert (["eof", "lost"], ["lost"]) == (client.events, server.events)
        assert not link.open

    play(scenario)


def test_an_abort_is_a_reset_for_the_other() -> None:
    """What was not sent is lost."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        client.transport.write(b"never mind")
        client.transport.abort()
        await trio.sleep(1)
        assert (b"", ["ConnectionResetError"], ["lost"]) == (server.data, server.events, client.events)

    play(scenario)


def test_a_reset_breaks_both_ends() -> None:
    """At most a part of what was on its way arrives."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        client.transport.write(bytes(1000))
        link.reset()
        await trio.sleep(1)
        assert len(server.data) <= 1000
        assert (["ConnectionResetError"], ["ConnectionResetError"]) == (client.events, server.events)

    play(scenario)


def test_nothing_passes_a_link_that_is_held() -> None:
    """Neither bytes nor ends; a sender is paused when the kernel has enough; all comes when the link goes on."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        link.hold()
        client.transport.write(bytes(200_000))
        assert ["pause"] == client.events
        await trio.sleep(100)
        assert server.data == b""
        link.go_on()
        await trio.sleep(1)
        assert (200_000, ["pause", "resume"]) == (len(server.data), client.events)
        link.hold()
        client.transport.close()
        await trio.sleep(1)
        assert (["pause", "resume", "lost"], []) == (client.events, server.events)
        link.go_on()
        await trio.sleep(1)
        assert ["eof", "lost"] == server.events

    play(scenario)


@pytest.mark.parametrize(("answer", "error"), [(Answer.REFUSE, ConnectionRefusedError), (Answer.SILENCE, TimeoutError)])
def test_a_dial_may_fail(answer: Answer, error: type[Exception]) -> None:
    """An address refuses, or does not answer for a long time; an unknown one refuses."""

    async def scenario(network: Network, link: Link, client: Notes, server: Notes) -> None:
        network.answer = answer
        with pytest.raises(error):
            await run_aio(network.aio_create_connection, Notes, "peer", 1)
        network.answer = Answer.ACCEPT
        with pytest.raises(ConnectionRefusedError):
            await run_aio(network.aio_create_connection, Notes, "elsewhere", 1)

    play(scenario)
