"""The wait for etcd: it ends when etcd is there, when its time is over, and when it is cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog
import trio

from support.processes import free_port
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.worker.errors import RuntimeFailed
from trio_sidecar.worker.etcd import wait_for_etcd

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_etcd_is_there(autojump_clock: MockClock) -> None:
    """One endpoint of several is enough, with or without a scheme, and nothing is logged."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    with structlog.testing.capture_logs() as logs:
        await wait_for_etcd({"ETCD_ENDPOINTS": f"http://127.0.0.1:{free_port()}, 127.0.0.1:{port}"})
    await listener.aclose()
    assert [] == logs


async def test_etcd_comes_later() -> None:
    """Etcd that starts after us is found, and that we wait is said once."""
    port = free_port()
    with structlog.testing.capture_logs() as logs, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_etcd, {"ETCD_ENDPOINTS": f"http://127.0.0.1:{port}"})
            await trio.sleep(0.7)  # more than one attempt
            (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    await listener.aclose()
    assert ["waiting_for_etcd"] == [entry["event"] for entry in logs]


async def test_etcd_does_not_come() -> None:
    """When its time is over the wait fails, naming endpoint and time."""
    environment = {
        "ETCD_ENDPOINTS": f"http://127.0.0.1:{free_port()}",
        "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.2",
    }
    with trio.fail_after(10), pytest.raises(RuntimeFailed, match=r"etcd at http://127\.0\.0\.1:\d+ .* within 200ms"):
        await wait_for_etcd(environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ETCD_ENDPOINTS", ""),
        ("ETCD_ENDPOINTS", "http://"),
        ("ETCD_ENDPOINTS", "http://host:port"),
        ("ETCD_ENDPOINTS", "http://host:2379,"),
        ("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "soon"),
        ("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "-1"),
    ],
)
async def test_bad_variable(name: str, value: str) -> None:
    """A variable that makes no sense is named, at once."""
    with trio.fail_after(1), pytest.raises(InvalidConfig, match=name):
        await wait_for_etcd({name: value})
