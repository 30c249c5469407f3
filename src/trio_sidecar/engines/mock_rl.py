"""RL controls of the mock engine: pausing, sleeping and weight versions, as vLLM has them (wire-and-server 6.5)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from trio_sidecar.bridge import AioLock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    FinishWeightUpdateRequest,
    FinishWeightUpdateResponse,
    GetWeightVersionRequest,
    GetWeightVersionResponse,
    InitWeightTransferEngineRequest,
    InitWeightTransferEngineResponse,
    IsPausedRequest,
    IsPausedResponse,
    IsSleepingRequest,
    IsSleepingResponse,
    PauseGenerationRequest,
    PauseGenerationResponse,
    PauseMode,
    ResumeGenerationRequest,
    ResumeGenerationResponse,
    SleepRequest,
    SleepResponse,
    StartDraftWeightUpdateRequest,
    StartDraftWeightUpdateResponse,
    StartWeightUpdateRequest,
    StartWeightUpdateResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    UpdateWeightVersionRequest,
    UpdateWeightVersionResponse,
    WakeUpRequest,
    WakeUpResponse,
)

if TYPE_CHECKING:
    import betterproto2

__all__ = ["Generation", "MockRl"]

MEMORY = frozenset({"weights", "kv_cache"})
EVERYTHING = MEMORY | {"scheduling"}


class Generation(Protocol):
    """What the controls do to running requests; see :class:`~trio_sidecar.engines.mock.MockEngine`."""

    def abort_all(self) -> None:
        """End all requests with ABORTED."""
        ...

    async def aio_wait_idle(self) -> None:
        """Return when no request is left."""
        ...

    def freeze(self) -> None:
        """Make no more tokens, and begin with no request, until thawed."""
        ...

    def thaw(self) -> None:
        """Go on."""
        ...

    def clear_cache(self) -> None:
        """Forget cached blocks."""
        ...


class MockRl:
    """The controls of one mock engine; changes one at a time, in order.

    Args:
        generation: What they act on.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._lock = AioLock()
        self._paused = False
        self._refusing = False
        self._asleep: frozenset[str] = frozenset()
        self._version = "default"

    def check_admission(self) -> None:
        """Refuse a request that comes after an ABORT or WAIT pause; after KEEP and in sleep it queues.

        Raises:
            RpcError: UNAVAILABLE.
        """
        if self._refusing:
            raise RpcError(StatusCode.UNAVAILABLE, "generation is paused")

    async def aio_call(self, request: betterproto2.Message) -> betterproto2.Message | None:
        """Answer a call; None if it is not of this kind.

        Raises:
            RpcError: INVALID_ARGUMENT.
        """
        match request:
            case IsPausedRequest():
                return IsPausedResponse(paused=self._paused)
            case IsSleepingRequest():
                return IsSleepingResponse(sleeping=self._paused or bool(self._asleep))
            case GetWeightVersionRequest():
                return GetWeightVersionResponse(weight_version=self._version)
        answer = self._weights(request)
        if answer is not None:
            return answer
        async with self._lock:
            return await self._aio_change(request)

    async def _aio_change(self, request: betterproto2.Message) -> betterproto2.Message | None:
        match request:
            case PauseGenerationRequest():
                await self._aio_pause(request.mode, clear_cache=request.clear_cache is not False)
                return PauseGenerationResponse()
            case ResumeGenerationRequest():
                self._resume()
                return ResumeGenerationResponse()
            case SleepRequest():
                await self._aio_pause(request.mode, clear_cache=True)
                self._asleep = EVERYTHING if request.level != 0 else EVERYTHING - MEMORY
                # Whoever comes now waits until the engine wakes up.
                self._refusing = False
                self._generation.freeze()
                return SleepResponse()
            case WakeUpRequest():
                self._wake(frozenset(request.tags) or EVERYTHING)
                return WakeUpResponse()
        return None

    async def _aio_pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        if not PauseMode.UNSPECIFIED <= mode <= PauseMode.KEEP:
            reason = f"mode {int(mode)} is unknown; allowed are ABORT, WAIT and KEEP"
            raise RpcError(StatusCode.INVALID_ARGUMENT, reason)
        if mode is PauseMode.KEEP:
            self._generation.freeze()
        else:
            self._refusing = True
            if mode is PauseMode.WAIT:
                await self._generation.aio_wait_idle()
            else:
                self._generation.abort_all()
        self._paused = True
        if clear_cache:
            self._generation.clear_cache()

    def _resume(self) -> None:
        self._paused = self._refusing = False
        if not self._asleep:
            self._generation.thaw()

    def _wake(self, parts: frozenset[str]) -> None:
        self._asleep -= parts
        if not self._asleep & MEMORY:
            self._asleep = frozenset()
            self._resume()

    def _weights(self, request: betterproto2.Message) -> betterproto2.Message | None:  # noqa: PLR0911 - one per call
        match request:
            case InitWeightTransferEngineRequest():
                _check_object(request.init_info_json, "init_info_json")
                return InitWeightTransferEngineResponse()
            case StartWeightUpdateRequest():
                return StartWeightUpdateResponse()
            case StartDraftWeightUpdateRequest():
                return StartDraftWeightUpdateResponse()
            case UpdateWeightsRequest():
                _check_object(request.update_info_json, "update_info_json")
                return UpdateWeightsResponse()
            case FinishWeightUpdateRequest():
                if request.weight_version is not None:
                    self._set_version(request.weight_version)
                return FinishWeightUpdateResponse()
            case UpdateWeightVersionRequest():
                self._set_version(request.weight_version)
                return UpdateWeightVersionResponse()
        return None

    def _set_version(self, version: str) -> None:
        if not version.strip():
            raise RpcError(StatusCode.INVALID_ARGUMENT, "weight_version is blank")
        self._version = version


def _check_object(text: bytes, field: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RpcError(StatusCode.INVALID_ARGUMENT, f"{field} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RpcError(StatusCode.INVALID_ARGUMENT, f"{field} must hold a JSON object")
