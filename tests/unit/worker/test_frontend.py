"""The front end's life, with a stand-in for Dynamo."""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import structlog
import trio

from trio_sidecar.bridge import AioEvent, Host, run
from trio_sidecar.config import FrontendSettings, RouterMode
from trio_sidecar.errors import InvalidConfig, MissingExtra
from trio_sidecar.worker.frontend import FrontendBinding, run_frontend

if TYPE_CHECKING:
    from collections.abc import Iterator


@attrs.define(eq=False)
class FakeRuntime:
    """Stands for the runtime: serving ends when it is shut down."""

    down: AioEvent = attrs.field(factory=AioEvent)

    def shutdown(self) -> None:
        """Let serving end."""
        self.down.set()


@attrs.define(eq=False)
class FakeFrontend:
    """Stands for Dynamo.

    Attributes:
        failure: Raised instead of serving.
        early: Serving ends at once.
        signum: Sent to the process once it serves.
        made: How runtime and engine were made.
    """

    failure: Exception | None = None
    early: bool = False
    signum: int | None = None
    made: list[tuple[Any, ...]] = attrs.field(factory=list)

    @property
    def binding(self) -> FrontendBinding:
        """It, as the front end sees it."""
        return FrontendBinding(
            open_runtime=self._open_runtime, aio_make_engine=self._aio_make_engine, aio_run_input=self._aio_run_input
        )

    def _open_runtime(self, loop: object, discovery: str, request_plane: str) -> FakeRuntime:
        self.made.append((discovery, request_plane))
        return FakeRuntime()

    async def _aio_make_engine(self, runtime: FakeRuntime, host: str, port: int, mode: RouterMode) -> str:
        self.made.append((host, port, mode))
        return "engine"

    async def _aio_run_input(self, runtime: FakeRuntime, engine: str) -> None:
        assert "engine" == engine
        if self.failure is not None:
            raise self.failure
        if self.signum is not None:
            signal.raise_signal(self.signum)
        if not self.early:
            await runtime.down.aio_wait()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port, and an environment that is put back."""
    monkeypatch.setenv("DYN_LOG", "warn")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.delenv("DYN_REQUEST_PLANE", raising=False)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def serve(fake: FakeFrontend, port: int, host: Host = Host.TRIO) -> tuple[int, list[str]]:
    """Run the front end; its exit code, and the reasons that it logged for a failure."""

    async def main() -> int:
        with trio.fail_after(10):
            return await run_frontend(FrontendSettings(http_port=port), binding=fake.binding)

    with structlog.testing.capture_logs() as logs:
        code = run(main, host=host)
    return code, [entry["reason"] for entry in logs if entry["event"] == "frontend_failed"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ends_on_a_signal(port: int, host: Host, signum: signal.Signals) -> None:
    """A signal shuts the runtime down, which lets requests end; the exit code is 0."""
    fake = FakeFrontend(signum=signum)
    assert (0, []) == serve(fake, port, host)
    assert [("file", "tcp"), ("127.0.0.1", port, RouterMode.ROUND_ROBIN)] == fake.made


def test_port_is_taken(port: int) -> None:
    """A port that somebody listens on is refused before Dynamo starts, by the flag's name."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        fake = FakeFrontend()
        with pytest.raises(InvalidConfig, match=f"--http-port: 127.0.0.1:{port} is in use by another socket"):
            serve(fake, port)
    assert [] == fake.made


def test_dynamo_fails(port: int) -> None:
    """Dynamo's reason is the one line of a failed front end."""
    fake = FakeFrontend(failure=RuntimeError("no discovery"))
    assert (1, ["Dynamo's runtime failed: no discovery"]) == serve(fake, port)


def test_ends_by_itself(port: int) -> None:
    """A front end that ends though nobody asked is a failure."""
    code, (reason,) = serve(FakeFrontend(early=True), port)
    assert 1 == code
    assert "without being asked" in reason


async def test_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the front end says which one to install."""
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.delitem(sys.modules, "dynamo._core", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'trio-sidecar\[dynamo\]'"):
        await run_frontend(FrontendSettings())


@pytest.mark.rule("R11.7")
async def test_stop_while_it_waits_for_etcd(aio_loop: object, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the wait for etcd at once; Dynamo, which could not be interrupted, is not even asked."""
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    dynamo = FakeFrontend()
    with trio.fail_after(5), structlog.testing.capture_logs():
        async with trio.open_nursery() as nursery:

            async def stop_later() -> None:
                await trio.sleep(0.1)
                signal.raise_signal(signal.SIGTERM)

            nursery.start_soon(stop_later)
            assert 0 == await run_frontend(FrontendSettings(http_port=port), binding=dynamo.binding)
    assert [] == dynamo.made
