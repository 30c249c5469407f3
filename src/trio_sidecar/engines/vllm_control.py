"""``vllm.Control`` over a running vLLM (wire-and-server 5 and 6); asyncio-flavoured, no import of vLLM.

Order of checks for the RL lifecycle: capability, arguments, lock, engine. Calls that change something share one lock
and so happen in the order in which they came; questions do not wait for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from trio_sidecar import wire
from trio_sidecar.bridge import AioLock
from trio_sidecar.engines.vllm_binding import status_of
from trio_sidecar.errors import RpcError, StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import betterproto2

    from trio_sidecar.engines.vllm_binding import Requests
    from trio_sidecar.engines.vllm_facts import VllmFacts
    from trio_sidecar.engines.vllm_lora import LoraRegistry

__all__ = ["ControlTarget", "VllmControl"]

MODES = {
    wire.PauseMode.UNSPECIFIED: "abort",
    wire.PauseMode.ABORT: "abort",
    wire.PauseMode.WAIT: "wait",
    wire.PauseMode.KEEP: "keep",
}
KV_SCHEMA_VERSION = 1


class ControlTarget(Protocol):
    """What the calls act on: the engine of this process."""

    @property
    def facts(self) -> VllmFacts:
        """What it is."""
        ...

    @property
    def llm(self) -> Any:
        """The ``AsyncLLM`` that runs now.

        Raises:
            RpcError: INTERNAL, it has died.
        """
        ...

    @property
    def requests(self) -> Requests:
        """Makes vLLM's own objects."""
        ...

    @property
    def loras(self) -> LoraRegistry:
        """The adapters."""
        ...

    async def aio_guarded(self, aio_fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a call of vLLM's, which would otherwise wait for ever for an engine that has died."""
        ...

    async def aio_abort(self, request_ids: Sequence[str]) -> None:
        """Abort every request with one of these ids."""
        ...

    def shut_down(self) -> None:
        """Ask this process to end.

        Raises:
            RpcError: FAILED_PRECONDITION, that is not the engine's to ask.
        """
        ...


class VllmControl:
    """The calls, by the type of their request."""

    def __init__(self, target: ControlTarget) -> None:
        self._target = target
        self._lock = AioLock()

    async def aio_call(  # noqa: PLR0911 - a table
        self, name: str, request: betterproto2.Message
    ) -> betterproto2.Message:
        """Answer one call.

        Args:
            name: Of the call, for messages.
            request: Its request.

        Raises:
            RpcError: As the tables of the specification say.
        """
        target = self._target
        match request:
            case wire.GetServerInfoRequest():
                return target.facts.server
            case wire.GetModelInfoRequest():
                return target.facts.model
            case wire.AbortRequest():
                await target.aio_abort(request.request_ids)
                return wire.AbortResponse()
            case wire.GetKvEventSourcesRequest():
                return wire.GetKvEventSourcesResponse(sources=kv_sources(target.llm))
            case wire.LoadLoraRequest():
                self._need_lora(name)
                adapter = await target.loras.aio_load(request.lora_name, request.source_path)
                return wire.LoadLoraResponse(adapter=adapter)
            case wire.UnloadLoraRequest():
                if request.lora_name.strip():  # a blank name is refused before anything else
                    self._need_lora(name)
                return wire.UnloadLoraResponse(adapter=await target.loras.aio_unload(request.lora_name))
            case wire.ListLorasRequest():
                self._need_lora(name)
                return wire.ListLorasResponse(adapters=target.loras.adapters())
            case wire.ShutdownRequest():
                target.shut_down()
                return wire.ShutdownResponse()
            case _:
                return await self._aio_lifecycle(name, request)

    async def _aio_lifecycle(  # noqa: PLR0911 - a table
        self, name: str, request: betterproto2.Message
    ) -> betterproto2.Message:
        """Pause and sleep, and weight updates."""
        match request:
            case wire.PauseGenerationRequest():
                mode, clear = _mode(request.mode), request.clear_cache is not False
                await self._aio_change(name, lambda llm: llm.pause_generation(mode=mode, clear_cache=clear))
                return wire.PauseGenerationResponse()
            case wire.ResumeGenerationRequest():
                await self._aio_change(name, lambda llm: llm.resume_generation())
                return wire.ResumeGenerationResponse()
            case wire.IsPausedRequest():
                paused = await self._aio_ask(name, lambda llm: llm.is_paused())
                return wire.IsPausedResponse(paused=bool(paused))
            case wire.SleepRequest():
                self._need_sleep(name)
                mode, level = _mode(request.mode), 1 if request.level is None else request.level
                await self._aio_change(name, lambda llm: llm.sleep(level, mode))
                return wire.SleepResponse()
            case wire.WakeUpRequest():
                self._need_sleep(name)
                tags = list(request.tags) or None
                await self._aio_change(name, lambda llm: llm.wake_up(tags))
                return wire.WakeUpResponse()
            case wire.IsSleepingRequest():
                sleeping = await self._aio_ask(name, lambda llm: llm.is_sleeping())
                return wire.IsSleepingResponse(sleeping=bool(sleeping))
            case wire.UpdateWeightVersionRequest():
                version = _version(request.weight_version)
                await self._aio_change(name, lambda llm: llm.update_weight_version(version))
                return wire.UpdateWeightVersionResponse()
            case wire.GetWeightVersionRequest():
                return wire.GetWeightVersionResponse(
                    weight_version=str(await self._aio_ask(name, lambda llm: llm.get_weight_version()))
                )
            case _:
                return await self._aio_weights(name, request)

    async def _aio_weights(self, name: str, request: betterproto2.Message) -> betterproto2.Message:
        """What needs weight transfer."""
        make = self._target.requests
        if not self._target.facts.weight_transfer:
            reason = f"{name} needs weight transfer, which the engine runs without (--weight-transfer-config)"
            raise RpcError(StatusCode.FAILED_PRECONDITION, reason, rpc=name)
        match request:
            case wire.InitWeightTransferEngineRequest():
                start = make.weight_init(_json_object(request.init_info_json, "init_info_json"))
                await self._aio_change(name, lambda llm: llm.init_weight_transfer_engine(start))
                return wire.InitWeightTransferEngineResponse()
            case wire.StartWeightUpdateRequest():
                await self._aio_change(name, lambda llm: llm.start_weight_update())
                return wire.StartWeightUpdateResponse()
            case wire.StartDraftWeightUpdateRequest():
                if not self._target.facts.draft_updates:
                    raise RpcError(StatusCode.FAILED_PRECONDITION, f"{name} needs a draft model", rpc=name)
                await self._aio_change(name, lambda llm: llm.start_draft_weight_update())
                return wire.StartDraftWeightUpdateResponse()
            case wire.UpdateWeightsRequest():
                update = make.weight_update(_json_object(request.update_info_json, "update_info_json"))
                await self._aio_change(name, lambda llm: llm.update_weights(update))
                return wire.UpdateWeightsResponse()
            case wire.FinishWeightUpdateRequest():
                version = None if request.weight_version is None else _version(request.weight_version)
                await self._aio_change(name, lambda llm: llm.finish_weight_update(version))
                return wire.FinishWeightUpdateResponse()
            case _:
                raise RpcError(StatusCode.UNIMPLEMENTED, f"{name} is not supported", rpc=name)

    async def _aio_change(self, name: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        async with self._lock:
            return await self._aio_ask(name, call)

    async def _aio_ask(self, name: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            return await self._target.aio_guarded(call, self._target.llm)
        except Exception as error:
            raise RpcError(StatusCode.INTERNAL, f"{name} failed: {status_of(error).detail}", rpc=name) from error

    def _need_lora(self, name: str) -> None:
        if not self._target.facts.supports_lora:
            reason = f"{name} needs LoRA, which the engine runs without (--enable-lora)"
            raise RpcError(StatusCode.FAILED_PRECONDITION, reason, rpc=name)

    def _need_sleep(self, name: str) -> None:
        if not self._target.facts.sleep_mode:
            reason = f"{name} needs sleep mode, which the engine runs without (--enable-sleep-mode)"
            raise RpcError(StatusCode.FAILED_PRECONDITION, reason, rpc=name)


def kv_sources(llm: Any) -> list[wire.KvEventSource]:
    """One entry per rank that publishes KV events over ZeroMQ."""
    found = []
    for rank, config in sorted(llm.get_kv_event_sources().items()):
        if config.enable_kv_cache_events and config.publisher == "zmq":
            found.append(
                wire.KvEventSource(
                    transport="zmq",
                    endpoint=config.endpoint,
                    topic=config.topic,
                    replay_endpoint=config.replay_endpoint or "",
                    data_parallel_rank=rank,
                    encoding="msgpack",
                    schema_version=KV_SCHEMA_VERSION,
                    buffer_steps=config.buffer_steps,
                    hwm=config.hwm,
                    max_queue_size=config.max_queue_size,
                )
            )
    return found


def _mode(mode: wire.PauseMode) -> str:
    known = MODES.get(mode)
    if known is None:
        reason = f"mode {int(mode)} is unknown; allowed are {', '.join(f'{int(each)}' for each in MODES)}"
        raise RpcError(StatusCode.INVALID_ARGUMENT, reason)
    return known


def _version(text: str) -> str:
    if not text.strip():
        raise RpcError(StatusCode.INVALID_ARGUMENT, "weight_version is blank")
    return text


def _json_object(data: bytes, field: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = f"{field} is not JSON: {str(error) or 'nested too deeply'}"
        raise RpcError(StatusCode.INVALID_ARGUMENT, reason) from error
    if not isinstance(value, dict):
        raise RpcError(StatusCode.INVALID_ARGUMENT, f"{field} is not a JSON object")
    return value
