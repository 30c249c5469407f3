"""Real processes that die or stop in the middle of answers: every client is told, nothing stays, and it comes back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from support import peers
from support.backends import EngineKind, mock_backend, vllm_backend
from support.faults import Service, open_service, processes_of_session
from support.stack import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.faults import Ending

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(120)]

CLIENTS = 4
TOLD_SECONDS = 5.0
PINGED_SECONDS = 8.0
FREED_SECONDS = 2.0
IDLE_SECONDS = 5
ARGUMENTS = (
    "--keepalive-secs=1",
    "--keepalive-timeout-secs=1",
    f"--idle-timeout-secs={IDLE_SECONDS}",
)


@pytest.fixture(scope="module", params=list(EngineKind), ids=lambda kind: kind.value)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker before an engine; each test leaves both alive."""
    directory = tmp_path_factory.mktemp("faults")
    make = vllm_backend if request.param is EngineKind.VLLM_RS else mock_backend
    with (
        make(directory / "engine", tokens_per_second=50) as backend,
        open_service(backend, directory, arguments=ARGUMENTS) as running,
    ):
        yield running


def check_told(endings: list[Ending]) -> None:
    """Each client got some tokens, then one error and nothing else, and none a success."""
    assert CLIENTS == len(endings)
    assert all(ending.tokens and ending.single for ending in endings), endings
    assert [1] * CLIENTS == [ending.errors for ending in endings]


@pytest.mark.rule("R15.2", "R15.5", "FR-018")
async def test_a_server_that_is_killed(service: Service) -> None:
    """Its clients are told at once; its port is free, and the worker serves whoever listens there next."""
    before = service.worker.log.count('"engine_back"')
    async with service.client() as client:
        await service.serves(client)
        server = service.backend.engine.process
        endings, seconds = await service.interrupted(client, CLIENTS, lambda: os.kill(server.pid, signal.SIGKILL))
        check_told(endings)
        assert seconds < TOLD_SECONDS
        worker = service.worker
        await eventually(lambda: worker.log.count('"engine_away"') > before, "the worker knows")
        assert [] == processes_of_session(server.pid)
        service.restart_engine()
        await service.serves(client)
        assert before + 1 == worker.log.count('"engine_back"')
        assert worker.running


@pytest.mark.rule("FR-022")
async def test_a_server_that_is_stopped(service: Service) -> None:
    """SIGSTOP in the middle of answers: pings find it, the clients are told, and after SIGCONT the worker serves."""
    async with service.client() as client:
        await service.serves(client)
        pid = service.backend.engine.process.pid
        try:
            endings, seconds = await service.interrupted(client, CLIENTS, lambda: os.kill(pid, signal.SIGSTOP))
        finally:
            os.kill(pid, signal.SIGCONT)
        check_told(endings)
        assert seconds < PINGED_SECONDS
        assert "did not answer a keepalive ping" in service.worker.log
        await service.serves(client)


@pytest.mark.rule("R11.3")
async def test_a_worker_that_is_killed(service: Service) -> None:
    """Its engine is let go of, its clients are told, it leaves no process, and another worker takes its place."""
    async with service.client() as client:
        await service.serves(client)
        worker = service.worker

        endings, seconds = await service.interrupted(client, CLIENTS, lambda: os.kill(worker.pid, signal.SIGKILL))
        check_told(endings)
        assert seconds < TOLD_SECONDS
        await eventually(lambda: service.backend.open_requests() == 0, "the engine is free", seconds=FREED_SECONDS)
        assert [] == processes_of_session(worker.pid)
        service.start_worker()
        await service.serves(client)


@pytest.mark.rule("FR-017")
@pytest.mark.parametrize("service", [EngineKind.VLLM_RS], indirect=True, ids=["vllm-rs"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_an_engine_core(service: Service, fault: signal.Signals) -> None:
    """The server outlives its core, says that it serves, and is silent: the limit on silence ends every request."""
    async with service.client() as client:
        await service.serves(client)
        core = service.backend.engine.core
        assert core is not None
        endings, seconds = await service.interrupted(client, CLIENTS, lambda: os.kill(core.pid, fault))
        check_told(endings)
        assert IDLE_SECONDS - 1 < seconds < IDLE_SECONDS + TOLD_SECONDS
        if fault is signal.SIGSTOP:
            os.kill(core.pid, signal.SIGCONT)
        else:
            service.restart_engine()
        await service.serves(client)


@pytest.mark.rule("R15.7")
async def test_another_model_takes_the_port(tmp_path: Path) -> None:
    """The engine is replaced by one that serves something else: one error for each request, and the worker ends."""
    with (
        vllm_backend(tmp_path / "engine", tokens_per_second=50) as backend,
        open_service(backend, tmp_path, arguments=ARGUMENTS) as service,
    ):
        async with service.client() as client:
            server = backend.engine.process
            endings, _ = await service.interrupted(client, CLIENTS, lambda: os.kill(server.pid, signal.SIGKILL))
            check_told(endings)
            backend.engine.close()
            flags = {"--served-model-name": "another-model", "--max-model-len": 1024}
            other = peers.start_mock_server(flags, log_dir=tmp_path / "other", port=backend.engine.port)
            try:
                await eventually(lambda: not service.worker.running, "the worker has ended")
                assert service.worker.wait(seconds=1) not in {0, -signal.SIGKILL}
                assert "identity changed: model_id was" in service.worker.wait_for_line(r"worker_failed.*").string
                assert [] == processes_of_session(service.worker.pid)
                assert (await client.complete(max_tokens=3)).status >= 400
            finally:
                other.close()
