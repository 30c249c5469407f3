"""The engine that is a vLLM in this process: AsyncLLM behind the engine contract.

vLLM's front half runs on the loop's thread, its engine in processes of its own. Requests are asyncio's
(:mod:`trio_sidecar.engines.vllm_stream`); the engine's life is Trio's: :func:`open_vllm` starts it, watches it, starts
it again if that is wanted, and ends it.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import betterproto2
import structlog
import trio

from trio_sidecar.bridge import AioEvent, AioInterrupted, aio_unless, run_aio
from trio_sidecar.bridge.listen import aio_call_later
from trio_sidecar.engines.vllm_binding import status_of
from trio_sidecar.engines.vllm_control import VllmControl
from trio_sidecar.engines.vllm_launch import VllmLauncher, check_model
from trio_sidecar.engines.vllm_lora import LoraRegistry
from trio_sidecar.engines.vllm_stream import VllmStream
from trio_sidecar.errors import DeadEngine, RpcError, SidecarError, StatusCode
from trio_sidecar.wire import HealthCheckResponseServingStatus
from trio_sidecar.wire.methods import CONTROL, INFERENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from trio_sidecar.config import VllmSettings
    from trio_sidecar.engines.sampling import VllmJob
    from trio_sidecar.engines.vllm_facts import VllmFacts
    from trio_sidecar.engines.vllm_launch import RunningVllm
    from trio_sidecar.wire import GenerateRequest, LoraAdapter
    from trio_sidecar.wire.methods import Method

__all__ = ["EngineDied", "VllmEngine", "VllmStatistics", "open_vllm"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

SERVING_NAMES = ("", INFERENCE, CONTROL)
WATCH_SECS = 0.2
"""How often to look whether vLLM is alive; requests in flight hear of it without that."""

SHUTDOWN_REPLY_SECS = 0.05
"""How long the reply to Shutdown has to leave before this process asks itself to end."""

log = structlog.get_logger("trio_sidecar.engines.vllm")


class EngineDied(SidecarError):
    """vLLM has died, and is not to be started again."""

    def __init__(self, model: str, restarts: int) -> None:
        tried = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
        super().__init__(f"the vLLM engine of {model!r} has died{tried}; its own log says why")


@attrs.frozen(slots=True, kw_only=True)
class VllmStatistics:
    """A snapshot.

    Attributes:
        open: Streams that are not released.
        in_engine: Requests that vLLM knows.
        restarts: How often vLLM was started again.
    """

    open: int
    in_engine: int
    restarts: int


class VllmEngine:
    """Implements :class:`~trio_sidecar.engines.contract.Engine`; made by :func:`open_vllm`."""

    def __init__(self, running: RunningVllm) -> None:
        self._running = running
        self._dead = AioEvent()
        self._death_noticed = trio.Event()
        self._streams: dict[VllmStream, str] = {}
        self._restarts = 0
        self._control = VllmControl(self)
        self._loras = LoraRegistry(self, running.facts.served_names)

    def __repr__(self) -> str:
        """The model, and how much is going on."""
        return f"<VllmEngine {self.facts.model_id!r} {self.statistics()}>"

    @property
    def facts(self) -> VllmFacts:
        """What it is."""
        return self._running.facts

    @property
    def llm(self) -> Any:
        """The ``AsyncLLM`` that runs now.

        Raises:
            RpcError: INTERNAL, it has died.
        """
        if self._dead.is_set() or self._running.llm.errored:
            self.died()
            raise DeadEngine()
        return self._running.llm

    @property
    def requests(self) -> VllmEngine:
        """Makes vLLM's own objects."""
        return self

    @property
    def loras(self) -> LoraRegistry:
        """The adapters."""
        return self._loras

    def arguments(self, job: VllmJob) -> dict[str, Any]:
        """A job as vLLM wants it."""
        return self._running.binding.arguments(job, rank_offset=self.facts.rank_offset)

    def lora(self, adapter: LoraAdapter) -> Any:
        """An adapter as vLLM wants it."""
        return self._running.binding.lora(adapter)

    def weight_init(self, info: dict[str, Any]) -> Any:
        """The start of a weight transfer as vLLM wants it."""
        return self._running.binding.weight_init(info)

    def weight_update(self, info: dict[str, Any]) -> Any:
        """A weight update as vLLM wants it."""
        return self._running.binding.weight_update(info)

    def statistics(self) -> VllmStatistics:
        """A snapshot, for tests and for whoever looks for leaks."""
        in_engine = 0 if self._dead.is_set() else self._running.llm.output_processor.get_num_unfinished_requests()
        return VllmStatistics(open=len(self._streams), in_engine=in_engine, restarts=self._restarts)

    def aio_generate(self, request: GenerateRequest, metadata: Mapping[str, str]) -> VllmStream:
        """Open one generation; see the contract."""
        return VllmStream(self, request, metadata)

    async def aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make one call of ``vllm.Control``; see the contract."""
        answer = await self._control.aio_call(method.name, request)
        assert isinstance(answer, method.response)  # noqa: S101 - ties the table of calls to the method's types
        return answer

    async def aio_check_health(self, service: str) -> HealthCheckResponseServingStatus:
        """The health of one service; see the contract."""
        if service not in SERVING_NAMES:
            raise RpcError(StatusCode.NOT_FOUND, f"unknown service {service!r}", rpc="Check")
        if self._dead.is_set() or self._running.llm.errored:
            self.died()
            return HealthCheckResponseServingStatus.NOT_SERVING
        return HealthCheckResponseServingStatus.SERVING

    async def aio_guarded(self, aio_fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a call of vLLM's until it returns or the engine dies.

        Raises:
            RpcError: INTERNAL, the engine has died.
        """
        try:
            return await aio_unless(self._dead, aio_fn, *args)
        except AioInterrupted:
            raise DeadEngine() from None

    async def aio_abort(self, request_ids: Sequence[str]) -> None:
        """End every request with one of these ids as ABORTED; ids that mean nothing are ignored."""
        wanted = list(dict.fromkeys(request_ids))
        if not wanted:
            return
        try:
            await self.aio_guarded(self.llm.abort, wanted)
        except Exception as error:
            raise RpcError(StatusCode.INTERNAL, f"Abort failed: {status_of(error).detail}", rpc="Abort") from error

    async def aio_add_lora(self, adapter: LoraAdapter) -> bool:
        """Load an adapter on every rank."""
        return bool(await self.aio_guarded(self.llm.add_lora, self.lora(adapter)))

    async def aio_remove_lora(self, adapter: LoraAdapter) -> bool:
        """Remove an adapter from every rank."""
        return bool(await self.aio_guarded(self.llm.remove_lora, adapter.lora_id))

    def shut_down(self) -> None:
        """End this process as SIGTERM would, once the reply has left."""
        aio_call_later(SHUTDOWN_REPLY_SECS, os.kill, os.getpid(), signal.SIGTERM)

    def admit(self, stream: VllmStream, request_id: str) -> None:
        """Take note of a stream (for the stream only).

        Raises:
            RpcError: INTERNAL, the id is in use and vLLM was told not to make ids unique.
        """
        if not self.facts.unique_ids and request_id in self._streams.values():
            raise RpcError(StatusCode.INTERNAL, f"request_id {request_id!r} is in use")
        self._streams[stream] = request_id

    def release(self, stream: VllmStream) -> None:
        """Forget a stream (for the stream only)."""
        self._streams.pop(stream, None)

    def died(self) -> None:
        """Take note that vLLM is dead: fail everything that waits for it. Safe to repeat."""
        if self._dead.is_set():
            return
        log.error("vllm_died", open=len(self._streams))
        self._dead.set()
        self._death_noticed.set()
        for stream in tuple(self._streams):
            stream.fail(DeadEngine())

    async def wait_dead(self) -> None:
        """Wait until vLLM has died (Trio-flavoured)."""
        while not self._death_noticed.is_set():
            if self._running.llm.errored:
                self.died()
                return
            with trio.move_on_after(WATCH_SECS):
                await self._death_noticed.wait()

    async def aio_begin(self) -> None:
        """Let vLLM listen to its engine before the first request, so that a death is not missed; load adapters.

        Raises:
            RpcError: The engine has died, or refuses an adapter of the command line.
        """
        await self.aio_guarded(self._running.llm.get_supported_tasks)
        for name, path in self._running.parsed.lora_modules:
            await self._loras.aio_load(name, path, trusted=True)

    async def aio_replace(self, running: RunningVllm) -> None:
        """Go on with another vLLM, in which the adapters of the dead one are loaded again.

        Raises:
            RpcError: It has died as well, or refuses an adapter.
        """
        self._running = running
        self._restarts += 1
        self._dead.clear()
        self._death_noticed = trio.Event()
        await self.aio_guarded(running.llm.get_supported_tasks)
        await self._loras.aio_reload(self._loras.adapters())
        log.info("vllm_restarted", restarts=self._restarts)


@asynccontextmanager
async def open_vllm(settings: VllmSettings) -> AsyncIterator[VllmEngine]:
    """Start a vLLM in this process and keep it for the length of the block (Trio-flavoured).

    Raises:
        MissingExtra: vLLM is not installed.
        InvalidConfig: The model does not exist, or vLLM refuses an argument.
        IncompatibleEngine: The installed vLLM is not supported.
        EngineStartFailed: vLLM cannot start.
        EngineDied: vLLM died and was not to be restarted; the block was cancelled.
    """
    check_model(settings.model)
    launcher = VllmLauncher(settings)
    try:
        running = await launcher.start()
        life = _Life(settings, launcher, running)
        try:
            await run_aio(life.engine.aio_begin)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.watch, nursery.cancel_scope)
                yield life.engine
                nursery.cancel_scope.cancel()
        finally:
            await life.stop()  # noqa: ASYNC102 - shielded inside
    finally:
        launcher.close()
    if life.failure is not None:
        raise life.failure from None  # what the cancelled block raised says nothing


class _Life:
    """The vLLM that runs now, and what becomes of it."""

    def __init__(self, settings: VllmSettings, launcher: VllmLauncher, running: RunningVllm) -> None:
        self.engine = VllmEngine(running)
        self.failure: SidecarError | None = None
        self._settings = settings
        self._launcher = launcher
        self._running: RunningVllm | None = running

    async def watch(self, block: trio.CancelScope) -> None:
        """Restart vLLM when it dies, as often as is allowed; then cancel the block."""
        try:
            for _ in range(self._settings.restart_engine):
                await self.engine.wait_dead()
                await self.stop()
                self._running = await self._launcher.start()
                await run_aio(self.engine.aio_replace, self._running)
            await self.engine.wait_dead()
            raise EngineDied(self._settings.model, self._settings.restart_engine)
        except SidecarError as error:
            self.failure = error
            block.cancel()

    async def stop(self) -> None:
        """End the vLLM that runs now, if one does; in a shield, within the budget."""
        running, self._running = self._running, None
        if running is not None:
            await self._launcher.stop(running)
