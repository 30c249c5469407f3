"""The controls and updates of one engine (spec 12); asyncio-flavoured.

Nothing is ever sent twice: a call that may have had an effect is the trainer's to repeat (R12.7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import betterproto2

from trio_sidecar.errors import EngineShutdown, RpcError
from trio_sidecar.rl.bodies import (
    read_finish,
    read_inner_object,
    read_object,
    read_pause,
    read_sleep,
    read_version,
    read_wake_up,
)
from trio_sidecar.wire import (
    GetWeightVersionRequest,
    InitWeightTransferEngineRequest,
    IsPausedRequest,
    IsSleepingRequest,
    ResumeGenerationRequest,
    StartDraftWeightUpdateRequest,
    StartWeightUpdateRequest,
    UpdateWeightsRequest,
)
from trio_sidecar.wire import methods as rpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.rl.bodies import Body
    from trio_sidecar.wire import RlCapabilities
    from trio_sidecar.wire.methods import Method

    Answer: TypeAlias = dict[str, object]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

_BASE_CONTROLS = ("pause_generation", "resume_generation", "is_paused", "is_sleeping", "get_weight_version")
_SLEEP_CONTROLS = ("sleep", "wake_up")
_BASE_UPDATES = ("update_weight_version",)
_TRANSFER_UPDATES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
_DRAFT_UPDATES = ("start_draft_weight_update",)


def supported_controls(capabilities: RlCapabilities | None) -> tuple[str, ...]:
    """The controls that such an engine has (spec 12.1); ``is_sleeping`` also without sleep mode (R12.3)."""
    if capabilities is None:
        return ()
    return _BASE_CONTROLS + (_SLEEP_CONTROLS if capabilities.sleep_mode_enabled else ())


def supported_updates(capabilities: RlCapabilities | None) -> tuple[str, ...]:
    """The updates that such an engine has (spec 12.1); draft updates need weight transfer too (R12.1)."""
    if capabilities is None:
        return ()
    if not capabilities.weight_transfer_enabled:
        return _BASE_UPDATES
    return _BASE_UPDATES + _TRANSFER_UPDATES + (_DRAFT_UPDATES if capabilities.draft_weight_updates_enabled else ())


def unsupported(kind: str, name: str) -> Answer:
    """The envelope for a name that is not advertised (R12.2).

    Args:
        kind: ``control`` or ``update``.
        name: What was asked for.
    """
    return {"status": "error", "message": f"unsupported engine {kind}: {name}"}


class RlClient:
    """The controls and updates of one engine.

    Args:
        capabilities: What the engine says it can do; None if it says nothing, which means nothing.
        engine: The engine; None while it has not started.
    """

    def __init__(self, capabilities: RlCapabilities | None, engine: Engine | None) -> None:
        self._capabilities = capabilities
        self._engine = engine
        self._quieted: tuple[str, Body] | None = None
        self._controls: dict[str, Callable[[Body], Awaitable[Answer]]] = {
            "pause_generation": self._aio_pause,
            "resume_generation": self._aio_resume,
            "is_paused": self._aio_is_paused,
            "sleep": self._aio_sleep,
            "wake_up": self._aio_wake_up,
            "is_sleeping": self._aio_is_sleeping,
            "get_weight_version": self._aio_weight_version,
        }
        self._updates: dict[str, Callable[[Body], Awaitable[Answer]]] = {
            "init_weight_transfer_engine": self._aio_init_transfer,
            "start_weight_update": self._aio_start,
            "start_draft_weight_update": self._aio_start_draft,
            "update_weights": self._aio_update_weights,
            "finish_weight_update": self._aio_finish,
            "update_weight_version": self._aio_set_version,
        }

    async def aio_control(self, name: str, body: object) -> Answer:
        """Run one control (spec 12.2).

        Returns:
            The answer for the caller; an error envelope for a name that is not advertised.

        Raises:
            InvalidRequest: The body is not allowed; the engine was not asked.
            RpcError: The engine refused; names the call (R12.7).
            EngineShutdown: It has not started.
        """
        if name not in supported_controls(self._capabilities):
            return unsupported("control", name)
        return await self._controls[name](read_object(name, body))

    async def aio_update(self, name: str, body: object) -> Answer:
        """Run one update; like :meth:`aio_control`."""
        if name not in supported_updates(self._capabilities):
            return unsupported("update", name)
        return await self._updates[name](read_object(name, body))

    @property
    def quieted(self) -> bool:
        """Whether a pause or sleep was ordered, and not taken back since: the engine is not to get requests."""
        return self._quieted is not None

    async def aio_quiet_again(self) -> None:
        """Order a pause or sleep again if the engine, a new one perhaps, knows nothing of it (R12.8).

        Raises:
            SidecarError: The engine refused, or could not be asked.
        """
        if self._quieted is not None and not (await self._aio_call(rpc.IS_PAUSED, IsPausedRequest())).paused:
            name, body = self._quieted
            await self._controls[name](body)

    async def _aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        if self._engine is None:
            reason = f"{method.name}: the engine has not started"
            raise EngineShutdown(reason)
        try:
            return await self._engine.aio_call(method, request)
        except RpcError as error:
            raise error.named(method.name) from error

    # -- Controls ---------------------------------------------------------------------------------------------------

    async def _aio_pause(self, body: Body) -> Answer:
        request = read_pause(body)
        # Also if the call fails: Dynamo has withdrawn the worker, and leaves it so until the resume.
        self._quieted = ("pause_generation", body)
        await self._aio_call(rpc.PAUSE_GENERATION, request)
        return {"status": "paused"}

    async def _aio_resume(self, body: Body) -> Answer:  # noqa: ARG002 - nothing in it matters
        await self._aio_call(rpc.RESUME_GENERATION, ResumeGenerationRequest())
        # An engine without sleep mode may not know the question.
        can_sleep = self._capabilities is not None and self._capabilities.sleep_mode_enabled
        if can_sleep and await self._aio_asleep():
            return {"status": "resumed", "is_sleeping": True}
        self._quieted = None
        return {"status": "resumed"}

    async def _aio_is_paused(self, body: Body) -> Answer:  # noqa: ARG002
        return {"is_paused": (await self._aio_call(rpc.IS_PAUSED, IsPausedRequest())).paused}

    async def _aio_sleep(self, body: Body) -> Answer:
        request = read_sleep(body)
        self._quieted = ("sleep", body)
        await self._aio_call(rpc.SLEEP, request)
        return {"status": "sleeping"}

    async def _aio_wake_up(self, body: Body) -> Answer:
        await self._aio_call(rpc.WAKE_UP, read_wake_up(body))
        if await self._aio_asleep():
            return {"status": "partially_awake", "is_sleeping": True}
        self._quieted = None
        return {"status": "awake"}

    async def _aio_is_sleeping(self, body: Body) -> Answer:  # noqa: ARG002
        return {"is_sleeping": await self._aio_asleep()}

    async def _aio_asleep(self) -> bool:
        return (await self._aio_call(rpc.IS_SLEEPING, IsSleepingRequest())).sleeping

    async def _aio_weight_version(self, body: Body) -> Answer:  # noqa: ARG002
        answer = await self._aio_call(rpc.GET_WEIGHT_VERSION, GetWeightVersionRequest())
        return {"weight_version": answer.weight_version}

    # -- Updates ----------------------------------------------------------------------------------------------------

    async def _aio_init_transfer(self, body: Body) -> Answer:
        info = read_inner_object(body, "init_info")
        request = InitWeightTransferEngineRequest(init_info_json=info)
        await self._aio_call(rpc.INIT_WEIGHT_TRANSFER_ENGINE, request)
        return {"message": "Weight transfer initialized"}

    async def _aio_start(self, body: Body) -> Answer:  # noqa: ARG002
        await self._aio_call(rpc.START_WEIGHT_UPDATE, StartWeightUpdateRequest())
        return {"message": "Weight update started"}

    async def _aio_start_draft(self, body: Body) -> Answer:  # noqa: ARG002
        await self._aio_call(rpc.START_DRAFT_WEIGHT_UPDATE, StartDraftWeightUpdateRequest())
        return {"message": "Draft weight update started"}

    async def _aio_update_weights(self, body: Body) -> Answer:
        info = read_inner_object(body, "update_info")
        await self._aio_call(rpc.UPDATE_WEIGHTS, UpdateWeightsRequest(update_info_json=info))
        return {"message": "Weights updated"}

    async def _aio_finish(self, body: Body) -> Answer:
        await self._aio_call(rpc.FINISH_WEIGHT_UPDATE, read_finish(body))
        return {"message": "Weight update finished"}

    async def _aio_set_version(self, body: Body) -> Answer:
        request = read_version(body)
        await self._aio_call(rpc.UPDATE_WEIGHT_VERSION, request)
        return {"success": True, "new_version": request.weight_version}
