"""vLLM dies inside the worker's own process: what its requests hear, and what becomes of the worker."""

from __future__ import annotations

import signal
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import structlog
import trio

from support.fake_dynamo import ERRORS, Context, FakeDynamo, FakeDynamoError
from support.vllm_fakes import EngineDeadError, FakeLlm, FakeRequests, facts, output
from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint, aio_sleep
from trio_sidecar.config import TransportSettings, VllmSettings, WorkerSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines import vllm
from trio_sidecar.engines.vllm_launch import RunningVllm
from trio_sidecar.engines.vllm_shared import serve_worker
from trio_sidecar.errors import ErrorKind
from trio_sidecar.worker.dynamo import run_worker

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from trio_sidecar.worker.engine_object import EngineObject

    Loop = asyncio.AbstractEventLoop

REQUEST: dict[str, object] = {"model": "tiny", "token_ids": [11, 22, 33]}


class Llm(FakeLlm):
    """An ``AsyncLLM`` that the engine can be opened with."""

    output_processor = SimpleNamespace(get_num_unfinished_requests=int)

    async def get_supported_tasks(self) -> list[str]:
        """What it can do."""
        return ["generate"]

    def get_kv_event_sources(self) -> dict[int, Any]:
        """It publishes none."""
        return {}


class Classes(FakeRequests):
    """vLLM's classes."""

    def arguments(self, job: Any, *, rank_offset: int = 0) -> dict[str, Any]:
        """Its id and parameters."""
        return super().arguments(job)


@attrs.define(eq=False)
class Launcher:
    """Starts engines that are no engines.

    Attributes:
        lives: Those that were started, oldest first.
        stopped: How many were ended.
    """

    lives: list[Llm] = attrs.field(factory=list)
    stopped: int = 0

    async def start(self) -> RunningVllm:
        """Start the next one."""
        await trio.sleep(1)
        self.lives.append(llm := Llm())
        found = facts(
            model=wire.ModelInfo(model_id="tiny", served_model_name="tiny", supports_token_ids_input=True),
            server=wire.ServerInfo(api_version="vllm", instance_id=f"life-{len(self.lives)}"),
        )
        parsed: Any = SimpleNamespace(lora_modules=[])
        classes: Any = Classes()
        return RunningVllm(llm=llm, binding=classes, facts=found, parsed=parsed)

    async def stop(self, running: RunningVllm) -> None:
        """End it."""
        await trio.lowlevel.checkpoint()
        self.stopped += running.llm in self.lives

    def close(self) -> None:
        """Nothing is left to do."""


@attrs.define(eq=False)
class Endpoint:
    """The worker's.

    Attributes:
        events: What happened to it.
    """

    events: list[str] = attrs.field(factory=list)

    async def register_endpoint_instance(self) -> None:
        """Let the worker be found."""
        await aio_checkpoint()
        self.events.append("registered")

    async def unregister_endpoint_instance(self) -> None:
        """Hide it."""
        await aio_checkpoint()
        self.events.append("withdrawn")


@attrs.define(eq=False)
class Client:
    """One request."""

    chunks: list[Mapping[str, Any]] = attrs.field(factory=list)
    error: FakeDynamoError | None = None

    async def aio_ask(self, engine: EngineObject) -> None:
        """Ask, and take everything."""
        try:
            async for chunk in engine.generate(REQUEST, Context()):
                self.chunks.append(chunk)
        except FakeDynamoError as error:
            self.error = error


@pytest.fixture
async def launcher(aio_loop: object, autojump_clock: object, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """What the engine is started with."""
    await trio.lowlevel.checkpoint()
    made = Launcher()
    monkeypatch.setattr(vllm, "VllmLauncher", lambda _: made)
    monkeypatch.setattr(vllm, "check_model", lambda _: None)
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)
    for name in ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "DYN_LOG"):
        monkeypatch.setenv(name, "")
    return made


async def run(
    aio_serve: Callable[[EngineObject], Any], endpoint: Endpoint | None = None, **settings: Any
) -> tuple[int, list[str]]:
    """A worker's exit code, and the reasons that it logged for a failure."""
    dynamo = FakeDynamo(aio_serve=aio_serve, endpoint=endpoint or Endpoint())
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"))
    worker = partial(run_worker, WorkerSettings(transport=transport), binding=dynamo.binding)
    with structlog.testing.capture_logs() as logs, trio.fail_after(100):
        code = await serve_worker(VllmSettings(model="tiny", **settings), worker)
    return code, [entry["reason"] for entry in logs if entry["event"] == "worker_failed"]


@pytest.mark.rule("FR-018", "R10.16")
@pytest.mark.parametrize("noticed_by", ["request", "watch"])
async def test_vllm_dies_under_the_worker(launcher: Launcher, aio_loop: Loop, noticed_by: str) -> None:
    """What was delivered stays; then an error that another worker can make good; the worker fails and says why."""
    client = Client()

    async def aio_serve(engine: EngineObject) -> None:
        task = aio_loop.create_task(client.aio_ask(engine))
        (llm,) = launcher.lives
        await aio_sleep(0.1)
        llm.only.put(output("a", [7]))
        await aio_sleep(0.1)
        llm.errored = True
        if noticed_by == "request":
            llm.only.put(EngineDeadError())
        await aio_sleep(50)
        await task

    code, reasons = await run(aio_serve)
    assert [[7]] == [chunk["token_ids"] for chunk in client.chunks]
    assert isinstance(client.error, ERRORS[ErrorKind.ENGINE_SHUTDOWN])
    assert any(reason in str(client.error) for reason in ("the engine has died", "the engine is gone"))
    assert (1, 1) == (code, launcher.stopped)
    assert ["the vLLM engine of 'tiny' has died; its own log says why"] == reasons


@pytest.mark.rule("FR-018", "FR-024", "R15.6")
async def test_vllm_is_replaced_under_the_worker(launcher: Launcher, aio_loop: Loop) -> None:
    """With a restart allowed the worker refuses requests meanwhile, and then serves with the next vLLM."""
    clients = [Client() for _ in range(3)]

    async def aio_serve(engine: EngineObject) -> None:
        first = aio_loop.create_task(clients[0].aio_ask(engine))
        await aio_sleep(0.1)
        launcher.lives[0].errored = True
        launcher.lives[0].only.put(EngineDeadError())
        await aio_sleep(0.1)
        await clients[1].aio_ask(engine)
        await aio_sleep(10)
        last = aio_loop.create_task(clients[2].aio_ask(engine))
        await aio_sleep(0.1)
        launcher.lives[1].only.put(output("a", [7], finish_reason="length"))
        await first
        await last
        signal.raise_signal(signal.SIGTERM)

    endpoint = Endpoint()
    code, reasons = await run(aio_serve, endpoint, restart_engine=1)
    assert ["withdrawn", "registered"] == endpoint.events
    assert (0, [], 2) == (code, reasons, launcher.stopped)
    assert [True, True] == [isinstance(client.error, ERRORS[ErrorKind.ENGINE_SHUTDOWN]) for client in clients[:2]]
    assert (None, [[7]]) == (clients[2].error, [chunk["token_ids"] for chunk in clients[2].chunks])
