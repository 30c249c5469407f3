"""A real engine process is stopped in the middle of an answer: the stream ends with an error, and it serves again."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import trio

from support import peers
from support.mock_engine import request_of
from trio_sidecar.bridge import run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import HealthCheckResponseServingStatus

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

NOTICED_SECS = 15
BACK_SECS = 20


@pytest.mark.rule("FR-022", "FR-028")
async def test_engine_stops_and_goes_on(tmp_path: Path, aio_loop: object) -> None:
    """A stream from an engine under SIGSTOP ends with UNAVAILABLE; after SIGCONT the same pool serves."""
    server = peers.start_mock_server({"--itl-ms": 50}, log_dir=tmp_path)
    try:
        settings = TransportSettings(
            grpc_endpoint=GrpcEndpoint.parse(server.endpoint),
            grpc_connections=2,
            grpc_connect_attempt_timeout_secs=1.0,
            grpc_retry_interval_secs=0.2,
            keepalive_secs=0.5,
            keepalive_timeout_secs=1.0,
        )
        async with open_remote(settings) as engine:

            async def aio_generate() -> None:
                request = request_of(stopping={"max_new_tokens": 900, "ignore_eos": True})
                async with engine.aio_generate(request, {}) as stream:
                    await stream.aio_receive()
                    os.killpg(server.process.pid, signal.SIGSTOP)
                    while await stream.aio_receive():
                        pass

            with trio.fail_after(NOTICED_SECS), pytest.raises(RpcError, match="keepalive ping") as caught:
                await run_aio(aio_generate)
            assert caught.value.status is StatusCode.UNAVAILABLE
            os.killpg(server.process.pid, signal.SIGCONT)
            with trio.fail_after(BACK_SECS):
                while engine.pool.statistics().idle < 2:  # noqa: ASYNC110 - drives a real process
                    await trio.sleep(0.05)
                assert await run_aio(engine.aio_check_health, "") is HealthCheckResponseServingStatus.SERVING
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
        server.close()
