"""A server that runs out of file descriptors: no busy loop, and it serves again when there are some."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from pathlib import Path

import grpc
import pytest
import trio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support import peers
from support.processes import Child
from support.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

LIMIT, CONNECTIONS = 64, 150
QUIET_SECONDS, BUSY_SECONDS = 2.0, 1.0
LIMITED = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
    "sys.argv = ['trio-sidecar', 'engine', 'mock', '--listen=127.0.0.1:0']; "
    "runpy.run_module('trio_sidecar', run_name='__main__')"
)


def cpu_seconds(pid: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.rule("FR-108")
async def test_too_many_connections(tmp_path: Path) -> None:
    """More connections than a server has descriptors cost it no CPU, and when they are gone it answers as before."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * CONNECTIONS
    argv = [sys.executable, "-c", LIMITED.format(limit=LIMIT)]
    server = Child("server", argv, env=peers.environment(), log_dir=tmp_path)
    try:
        port = int(server.wait_for_line(r"listening on 127\.0\.0\.1:(\d+)")[1])
        with contextlib.ExitStack() as crowd:
            for _ in range(CONNECTIONS):
                crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            descriptors = Path(f"/proc/{server.pid}/fd")
            await eventually(lambda: len(list(descriptors.iterdir())) >= LIMIT - 4, "the descriptors are used up")
            before = cpu_seconds(server.pid)
            await trio.sleep(QUIET_SECONDS)
            assert cpu_seconds(server.pid) - before < BUSY_SECONDS
            assert server.running
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        with contextlib.closing(channel):
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await trio.to_thread.run_sync(
                lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=15, wait_for_ready=True)
            )
        assert health_pb2.HealthCheckResponse.SERVING == answer.status
    finally:
        server.close(seconds=5)
