"""The engine dies while it answers: clients are told, nobody hangs, and a new engine on that address serves again."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import trio

from support import peers
from support.backends import mock_backend
from support.stack import WorkerKind, eventually, stack

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

TOLD_SECONDS = 5
BACK_SECONDS = 20
CLIENTS = 6


@pytest.mark.rule("R10.16")
async def test_engine_dies_and_comes_back(tmp_path: Path) -> None:
    """Streams end with an error at once, requests fail fast meanwhile, and the same worker serves the next engine."""
    with (
        mock_backend(tmp_path / "engine", tokens_per_second=50) as backend,
        stack(backend, WorkerKind.OURS, tmp_path) as service,
    ):
        (worker,) = service.workers
        endings: list[str] = []
        async with service.client() as client:

            async def one() -> None:
                body = {"model": client.model, "prompt": client.prompt, "stream": True}
                body |= {"max_tokens": 900, "ignore_eos": True}
                endings.append((await client.http.post(f"{client.url}/v1/completions", json=body)).text)

            async with trio.open_nursery() as nursery:
                for _ in range(CLIENTS):
                    nursery.start_soon(one)
                await eventually(lambda: backend.open_requests() == CLIENTS, "the requests are running")
                await trio.sleep(0.5)  # some tokens
                os.kill(backend.engine.process.pid, signal.SIGKILL)
                died = time.monotonic()
            assert time.monotonic() - died < TOLD_SECONDS
            assert CLIENTS == sum('"error"' in ending and '"text"' in ending for ending in endings)
            assert 0 == sum('"finish_reason"' in ending for ending in endings)
            with trio.fail_after(TOLD_SECONDS):
                refused = await client.complete(max_tokens=3)
            assert refused.status in {500, 503}
            assert worker.running

            flags = {"--served-model-name": backend.model, "--ttft-ms": 5, "--itl-ms": 5, "--max-model-len": 1024}
            again = peers.start_mock_server(flags, log_dir=tmp_path / "again", port=backend.engine.port)
            try:
                with trio.fail_after(BACK_SECONDS):
                    while (answer := await client.complete(max_tokens=3)).status != 200:  # noqa: ASYNC110
                        await trio.sleep(0.2)
                assert backend.reply.text(3) == answer.text
            finally:
                again.close()


@pytest.mark.rule("R15.7")
async def test_another_model_on_the_same_port_ends_the_worker(tmp_path: Path) -> None:
    """A worker that was registered for one model does not serve another: it ends and says what differs."""
    with (
        mock_backend(tmp_path / "engine", tokens_per_second=50) as backend,
        stack(backend, WorkerKind.OURS, tmp_path) as service,
    ):
        (worker,) = service.workers
        async with service.client() as client:
            assert (await client.complete(max_tokens=3)).status == 200
            os.kill(backend.engine.process.pid, signal.SIGKILL)
            backend.engine.process.close(seconds=1)
            flags = {"--served-model-name": "another-model", "--max-model-len": 1024}
            again = peers.start_mock_server(flags, log_dir=tmp_path / "again", port=backend.engine.port)
            try:
                await eventually(lambda: not worker.running, "the worker has ended", seconds=BACK_SECONDS)
            finally:
                again.close()
            assert "served_model_name was" in worker.wait_for_line(r"worker_failed.*").string
            assert (await client.complete(max_tokens=3)).status >= 400


@pytest.mark.rule("R15.2", "R15.3")
async def test_requests_go_to_the_other_worker_meanwhile(tmp_path: Path) -> None:
    """One of two engines dies: its worker leaves discovery, the other answers everything, and it comes back."""
    with (
        mock_backend(tmp_path / "one", tokens_per_second=200) as first,
        mock_backend(tmp_path / "two", tokens_per_second=200) as second,
        stack(first, WorkerKind.OURS, tmp_path) as service,
    ):
        other = peers.start_worker(
            f"127.0.0.1:{second.engine.port}", discovery=service.discovery, log_dir=tmp_path, name="other"
        )
        try:
            await eventually(lambda: len(instances(service.discovery)) == 2, "both are registered")
            async with service.client() as client:
                for _ in range(4):
                    assert (await client.complete(max_tokens=3)).status == 200
                os.kill(first.engine.process.pid, signal.SIGKILL)
                first.engine.process.close(seconds=1)
                await eventually(lambda: len(instances(service.discovery)) == 1, "the worker has withdrawn")
                await trio.sleep(1)  # until the front end has heard of it
                answers = [await client.complete(max_tokens=3) for _ in range(10)]
                assert [200] * 10 == [answer.status for answer in answers]
                flags = {"--served-model-name": first.model, "--max-model-len": 1024}
                again = peers.start_mock_server(flags, log_dir=tmp_path / "again", port=first.engine.port)
                try:
                    await eventually(lambda: len(instances(service.discovery)) == 2, "it is back")
                finally:
                    again.close()
        finally:
            other.close()


def instances(discovery: Path) -> list[Path]:
    """What is registered in a directory."""
    return list((discovery / "v1" / "instances").glob("*generate*"))
