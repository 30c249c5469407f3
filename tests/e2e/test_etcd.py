"""Worker and front end that find each other through etcd."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from support import peers
from support.backends import mock_backend
from support.etcd import Etcd, running_etcd
from support.openai import open_client
from support.processes import Child, free_port
from support.stack import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.backends import Backend

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LEASE_SECONDS = 3
INSTANCES = "v1/instances/"
CARDS = "v1/mdc/"


def etcd_environment(url: str, **extra: str) -> dict[str, str]:
    """The environment of Dynamo's processes that find each other through etcd, which is Dynamo's default."""
    return peers.environment(
        ETCD_ENDPOINTS=url,
        ETCD_LEASE_TTL=str(LEASE_SECONDS),
        DYN_REQUEST_PLANE="tcp",
        DYN_EVENT_PLANE="zmq",
        DYN_SYSTEM_PORT="-1",
        **extra,
    )


@attrs.define(eq=False)
class Cluster:
    """Our worker and our front end over etcd."""

    etcd: Etcd
    backend: Backend
    frontend: Child
    url: str
    directory: Path
    workers: list[Child] = attrs.field(factory=list)

    def start_worker(self) -> Child:
        """Start another worker."""
        argv = [sys.executable, "-m", "trio_sidecar", "worker", f"--grpc-endpoint={self.backend.engine.endpoint}"]
        argv += ["--discovery-backend=etcd", "--withdraw-grace-secs=0.5", "--drain-secs=10"]
        name = f"worker-{len(self.workers)}"
        self.workers.append(Child(name, argv, env=etcd_environment(self.etcd.url), log_dir=self.directory))
        return self.workers[-1]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Etcd, an engine, a front end and one worker."""
    with running_etcd(tmp_path) as etcd, mock_backend(tmp_path / "engine", tokens_per_second=100) as backend:
        port = free_port()
        argv = [sys.executable, "-m", "trio_sidecar", "frontend", f"--http-port={port}"]
        frontend = Child("frontend", argv, env=etcd_environment(etcd.url), log_dir=tmp_path)
        running = Cluster(etcd, backend, frontend, f"http://127.0.0.1:{port}", tmp_path)
        try:
            running.start_worker()
            peers.wait_for_model(peers.Frontend(frontend, running.url), backend.model, running.workers)
            yield running
        finally:
            for child in (frontend, *running.workers):
                child.close(seconds=1)


@pytest.mark.rule("R11.7", "R11.13")
async def test_service_over_etcd(cluster: Cluster) -> None:
    """A worker is found through etcd; at SIGTERM its entry goes first, its requests end whole, and it exits."""
    etcd, (worker,) = cluster.etcd, cluster.workers
    async with open_client(cluster.url, cluster.backend.model, cluster.backend.prompt) as client:
        await eventually(lambda: len(etcd.keys(INSTANCES)) == 1, "the worker is registered")
        assert "dynamo/backend/generate" in etcd.keys(INSTANCES)[0]
        assert "dynamo/backend/generate" in etcd.keys(CARDS)[0]
        with trio.fail_after(20):
            while (answer := await client.complete(max_tokens=5)).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert cluster.backend.reply.text(5) == answer.text
        late = []

        async def ask() -> None:
            late.append(await client.complete(max_tokens=100, ignore_eos=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await eventually(lambda: cluster.backend.open_requests() == 1, "the request is running")
            worker.send(signal.SIGTERM)
            await eventually(lambda: etcd.keys(INSTANCES) == [], "the worker is withdrawn", seconds=1)
            assert worker.running
        assert [100] == [answer.usage[1] for answer in late]
        await eventually(lambda: not worker.running, "the worker has ended")
    assert 0 == worker.wait(seconds=0)
    assert "Traceback" not in worker.log


async def test_killed_worker(cluster: Cluster) -> None:
    """The entry of a worker that is killed goes with its lease, and another worker takes over meanwhile."""
    etcd, (worker,) = cluster.etcd, cluster.workers
    cluster.start_worker()
    await eventually(lambda: len(etcd.keys(INSTANCES)) == 2, "both workers are registered")
    worker.send(signal.SIGKILL)
    await eventually(lambda: len(etcd.keys(INSTANCES)) == 1, "the lease has ended", seconds=30)
    async with open_client(cluster.url, cluster.backend.model, cluster.backend.prompt) as client:
        with trio.fail_after(20):
            while (answer := await client.complete(max_tokens=5)).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.1)
    assert cluster.backend.reply.text(5) == answer.text


@pytest.mark.rule("R11.7", "R11.12")
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "late"])
@pytest.mark.parametrize("part", ["worker", "frontend"])
def test_no_etcd(tmp_path: Path, part: str, stopped: bool) -> None:
    """Without etcd both parts wait; a signal ends them with 0, the end of their patience with 1 and the reason."""
    url = f"http://127.0.0.1:{free_port()}"
    with mock_backend(tmp_path, tokens_per_second=100) as backend:
        argv = [sys.executable, "-m", "trio_sidecar", part]
        argv += [f"--http-port={free_port()}"] if part == "frontend" else [f"--grpc-endpoint={backend.engine.endpoint}"]
        patience = "60" if stopped else "2"
        env = etcd_environment(url, ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS=patience, DYN_DISCOVERY_BACKEND="etcd")
        child = Child(part, argv, env=env, log_dir=tmp_path)
        try:
            if stopped:
                child.wait_for_line("waiting_for_etcd|etcd not reachable yet")
                child.send(signal.SIGTERM)
            assert (0 if stopped else 1) == child.wait(seconds=5 if stopped else 20)
        finally:
            child.close(seconds=0)
    assert "Traceback" not in child.log
    if not stopped:
        assert '"reason": "Dynamo\'s runtime failed: ' in child.log
        assert "etcd" in child.log.splitlines()[-1]
