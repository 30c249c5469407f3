"""Probes are answered while there is no engine and no runtime yet, and with the truth where that is asked for."""

from __future__ import annotations

import pytest
import trio

from support.exposition import values
from support.worker_metrics import MODEL, FakeRecovery, new_metrics
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.metrics import WORKER_FAMILIES
from trio_sidecar.testing.fake_engine import FakeEngine
from trio_sidecar.worker.probes import open_pages, open_probes, system_port


async def free_port() -> int:
    """A port on the loopback address that nobody listens on."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


async def ask(port: int, request: bytes) -> bytes:
    """The first line of the answer."""
    return (await whole_answer(port, request)).partition(b"\r\n")[0]


async def whole_answer(port: int, request: bytes) -> bytes:
    """The answer."""
    with trio.fail_after(5):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request)
            return b"".join([part async for part in stream])


async def page(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    head, _, body = (await whole_answer(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).partition(
        b"\r\n\r\n"
    )
    return int(head.split()[1]), body.decode()


LOCAL = {"DYN_SYSTEM_HOST": "127.0.0.1"}


@pytest.mark.rule("R11.10", "R15.17", "FR-036")
async def test_probes_are_answered() -> None:
    """The three paths answer 200, anything else 404, and afterwards the port is free for the runtime."""
    port = await free_port()
    async with open_probes({"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}, new_metrics()):
        for path in (b"/live", b"/health?verbose=1", b"/metrics"):
            assert b"HTTP/1.1 200 OK" == await ask(port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 404 Not Found" == (await ask(port, b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n"))[:22]
    with pytest.raises(OSError, match=r"refused|all attempts"):
        await trio.open_tcp_stream("127.0.0.1", port)


async def test_peer_that_leaves() -> None:
    """A peer that says nothing and goes does no harm."""
    port = await free_port()
    async with open_probes({"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}, new_metrics()):
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        assert b"HTTP/1.1 200 OK" == await ask(port, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_silent_peer_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    """A peer that stays silent does not stay for ever."""
    port = await free_port()
    async with (
        open_probes({"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}, new_metrics()),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        with trio.fail_after(60):
            assert b"" == await stream.receive_some()


async def test_errors_come_out_plain() -> None:
    """What the block raises is not wrapped."""
    environment = {"DYN_SYSTEM_PORT": str(await free_port()), "DYN_SYSTEM_HOST": "127.0.0.1"}

    async def fail() -> None:
        async with open_probes(environment, new_metrics()):
            reason = "mine"
            raise ValueError(reason)

    with pytest.raises(ValueError, match="mine"):
        await fail()


async def test_port_is_taken() -> None:
    """A port that somebody has is refused by the name of the variable."""
    (other,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    environment = {"DYN_SYSTEM_PORT": str(other.socket.getsockname()[1]), "DYN_SYSTEM_HOST": "127.0.0.1"}
    async with other:
        with pytest.raises(InvalidConfig, match="DYN_SYSTEM_PORT: cannot listen"):
            async with open_probes(environment, new_metrics()):
                pass


@pytest.mark.parametrize(("text", "port"), [(None, None), ("", None), ("-1", None), ("0", 0), (" 9090 ", 9090)])
async def test_port(text: str | None, port: int | None) -> None:
    """Unset, empty and negative mean no system server."""
    environment = {} if text is None else {"DYN_SYSTEM_PORT": text}
    assert port == system_port(environment)
    if not port:
        async with open_probes(environment, new_metrics()):
            pass


@pytest.mark.parametrize("text", ["x", "65536", "1.5"])
def test_no_port(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(InvalidConfig, match="DYN_SYSTEM_PORT: must be a port"):
        system_port({"DYN_SYSTEM_PORT": text})


async def test_all_families_are_there_before_the_runtime() -> None:
    """A scrape that comes early finds every family, and the engine's state; health says in words what is missing."""
    port = await free_port()
    async with open_probes(LOCAL | {"DYN_SYSTEM_PORT": str(port)}, new_metrics()):
        status, text = await page(port, "/metrics")
        assert (200, "starting\n") == await page(port, "/health")
    assert 200 == status
    assert all(f"# TYPE {family.exposed}" in text for family in WORKER_FAMILIES)
    assert 1 == values(text)["engine_state{state=starting}"]


async def test_pages_tell_the_truth() -> None:
    """Always alive; healthy while the worker serves, and neither before nor while its engine is away nor in the end."""
    port, metrics, recovery = await free_port(), new_metrics(), FakeRecovery()
    async with open_pages(port, LOCAL, metrics):
        seen = [await page(port, "/health")]
        metrics.attach(FakeEngine(), MODEL, recovery)  # type: ignore[arg-type]
        for recovery.away in (False, True, False):
            seen.append(await page(port, "/health"))
        metrics.stop.request("SIGTERM")
        seen.append(await page(port, "/health"))
        assert (200, "alive\n") == await page(port, "/live")
        assert 1 == values((await page(port, "/metrics"))[1])["draining"]
        assert 404 == (await page(port, "/other"))[0]
    expected = [(503, "starting\n"), (200, "serving\n"), (503, "away\n"), (200, "serving\n"), (503, "draining\n")]
    assert expected == seen


async def test_pages_where_nobody_wants_them() -> None:
    """Without a port nobody listens; a port that is taken is refused by the name of the flag."""
    before = trio.lowlevel.current_statistics().tasks_living
    async with open_pages(None, LOCAL, new_metrics()):
        assert before == trio.lowlevel.current_statistics().tasks_living
    (other,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with other:
        with pytest.raises(InvalidConfig, match="--metrics-port: cannot listen"):
            async with open_pages(other.socket.getsockname()[1], LOCAL, new_metrics()):
                pass
