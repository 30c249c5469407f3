"""Loading, unloading and listing adapters (spec 13); asyncio-flavoured.

The engine's list is the truth, discovery follows it. Whatever may have changed the one without the other marks the
state as unreconciled, and the next call puts that right before it does anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
import betterproto2
import structlog

from trio_sidecar.bridge import AioLock, aio_timeout
from trio_sidecar.errors import EngineShutdown, InvalidRequest, ProtocolError, RpcError, SidecarError, StatusCode
from trio_sidecar.lora.inventory import Adapter, check_adapter, check_new_name, check_publishable, validated_inventory
from trio_sidecar.lora.locks import LockRegistry
from trio_sidecar.lora.records import Records
from trio_sidecar.lora.requests import LoraError, aio_resolve, read_load, read_unload
from trio_sidecar.wire import ListLorasRequest, LoadLoraRequest, UnloadLoraRequest
from trio_sidecar.wire.methods import LIST_LORAS, LOAD_LORA, UNLOAD_LORA

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import TypeAlias

    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.wire import LoraAdapter
    from trio_sidecar.wire.methods import Method

    Answer: TypeAlias = dict[str, object]

__all__ = ["UPDATES", "LoraManager", "LoraSettings"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

UPDATES = ("load_lora", "unload_lora", "list_loras")
"""The names under which Dynamo offers the operations."""

RPC_SECONDS = 60.0
"""Longest time one call of the lifecycle may take (R13.16)."""

DEFINITIVE = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.ALREADY_EXISTS,
        StatusCode.NOT_FOUND,
        StatusCode.FAILED_PRECONDITION,
    }
)
"""Refusals after which the engine is known to be as it was (R13.17); after others it has to be asked."""

log = structlog.get_logger("trio_sidecar.lora")


@attrs.frozen(slots=True, kw_only=True)
class LoraSettings:
    """What the lifecycle has to know.

    Attributes:
        enabled: Whether the operator wants it.
        supported: Whether the engine takes adapters, and has room for one.
        max_loras: How many.
        base_names: Every name of the base model.
        hot_swap: Whether the operator wants resident adapters to be replaced, which the contract cannot do (R13.9).
    """

    enabled: bool
    supported: bool
    max_loras: int
    base_names: frozenset[str]
    hot_swap: bool = False

    @property
    def active(self) -> bool:
        """Whether there is a lifecycle at all (R13.13)."""
        return self.enabled and self.supported and self.max_loras > 0


class LoraManager:
    """The adapters of one engine, and their records in discovery.

    Args:
        engine: The engine; None while it has not started.
        settings: What is wanted and possible.
        aio_download: Fetches an adapter and returns its directory.

    Attributes:
        records: Which adapters requests may select.
        locks: Their locks.
        reconciled: Whether discovery is known to follow the engine.
    """

    def __init__(
        self, engine: Engine | None, settings: LoraSettings, aio_download: Callable[[str], Awaitable[str]]
    ) -> None:
        self.records = Records()
        self.locks = LockRegistry(self.records.is_published)
        self.reconciled = False
        self._engine = engine
        self._settings = settings
        self._aio_download = aio_download
        self._mutex = AioLock()

    def supported_updates(self) -> tuple[str, ...]:
        """The names to advertise (R13.12)."""
        return UPDATES if self._settings.active else ()

    async def aio_update(self, name: str, body: object) -> Answer:
        """Run one operation.

        Returns:
            An envelope; failures are envelopes too (spec 13.4).
        """
        try:
            match name:
                case "load_lora":
                    return await self.aio_load(body)
                case "unload_lora":
                    return await self.aio_unload(body)
                case "list_loras":
                    return await self.aio_list()
        except SidecarError as error:
            log.warning("lora_update_failed", update=name, reason=str(error))
            return _failure(str(error), body)
        return _failure(f"unsupported engine update: {name}", body)

    async def aio_reconcile(self) -> None:
        """Make discovery follow the engine, if that is not known; a failure is a warning (R13.28, R13.31)."""
        async with self._mutex:
            if self._settings.active and self.records.ready:
                await self._aio_reconcile_if_needed()

    async def aio_unpublish_all(self) -> None:
        """The engine is away: nobody shall choose an adapter of this worker, until they are reconciled (R15.4)."""
        async with self._mutex:
            self.reconciled = False
            await self.records.aio_unpublish_all()

    async def aio_reconcile_or_fail(self) -> None:
        """Make discovery follow the engine again after it was away.

        Raises:
            SidecarError: It cannot be (R15.15).
        """
        async with self._mutex:
            if self._settings.active and self.records.ready and not self.reconciled:
                await self._aio_reconcile()

    # -- Operations; each raises SidecarError if it fails -----------------------------------------------------------

    async def aio_list(self) -> Answer:
        """The adapters in the engine (R13.15)."""
        self._check_ready()
        async with self._mutex:
            await self._aio_reconcile_if_needed()
            inventory = validated_inventory(await self._aio_list_raw())
        loras = {name: adapter.adapter_id for name, adapter in inventory.items()}
        return {"status": "success", "count": len(loras), "loras": loras}

    async def aio_load(self, body: object) -> Answer:
        """Load an adapter and publish it; one that is there already is left as it is."""
        request = read_load(body)
        self._check_ready()
        # The mutex also covers fetching: what was checked before it must still hold after it (R13.33).
        async with self._mutex:
            await self._aio_reconcile_if_needed()
            inventory = validated_inventory(await self._aio_list_raw())
            check_new_name(request.name, inventory, self._settings.base_names)
            resident = inventory.get(request.name)
            if resident is None:
                self._check_room(inventory)
                path = await aio_resolve(request.uri, self._aio_download)
            elif self._settings.hot_swap:
                reason = f"LoRA adapter {request.name!r} is loaded; hot swap is not supported, use another name"
                raise InvalidRequest(reason)
            was_reconciled, self.reconciled = self.reconciled, False
            async with self.locks.aio_writing(request.name):
                if resident is None:
                    adapter = await self._aio_load_native(request.name, path)
                    await self._aio_publish_loaded(adapter)
                else:
                    adapter = resident
                    await self.records.aio_publish(adapter)
            self.reconciled = was_reconciled
        done = "is loaded already" if resident else "was loaded"
        message = f"LoRA adapter {adapter.name!r} {done}"
        return _success(message, adapter.name, adapter.adapter_id) | {"hot_swap": False}

    async def aio_unload(self, body: object) -> Answer:
        """Remove an adapter from discovery and then from the engine."""
        name = read_unload(body)
        self._check_ready()
        async with self._mutex:
            await self._aio_reconcile_if_needed()
            resident = {adapter.lora_name: adapter for adapter in await self._aio_list_raw()}
            if name not in resident:
                reason = f"LoRA adapter {name!r} not found; available are {sorted(resident)}"
                raise InvalidRequest(reason)
            was_reconciled, self.reconciled = self.reconciled, False
            async with self.locks.aio_writing(name):
                published = self.records.find(name)
                await self.records.aio_unpublish(name)
                await self._aio_unload_native(name, published)
            self.reconciled = was_reconciled
        return _success(f"LoRA adapter {name!r} was unloaded", name, resident[name].lora_id)

    # -- Checks -----------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if not self._settings.active:
            reason = (
                "LoRA adapters are not enabled: it takes DYN_LORA_ENABLED=true and an engine with room for adapters"
            )
            raise InvalidRequest(reason)
        if not self.records.ready:
            reason = "the worker's endpoint is not ready; LoRA adapters cannot be managed yet"
            raise EngineShutdown(reason)

    def _check_room(self, inventory: Mapping[str, Adapter]) -> None:
        if len(inventory) >= self._settings.max_loras:
            reason = f"the engine's capacity of {self._settings.max_loras} LoRA adapters is used up; unload one first"
            raise InvalidRequest(reason)

    # -- Calls ------------------------------------------------------------------------------------------------------

    async def _aio_call(self, method: Method[Req, Resp], request: Req) -> Resp:
        if self._engine is None:
            reason = f"{method.name}: the engine has not started"
            raise EngineShutdown(reason)
        try:
            async with aio_timeout(RPC_SECONDS):
                return await self._engine.aio_call(method, request)
        except TimeoutError as error:
            reason = f"no answer within {RPC_SECONDS:g} s"
            raise RpcError(StatusCode.DEADLINE_EXCEEDED, reason, rpc=method.name) from error
        except RpcError as error:
            raise error.named(method.name) from error

    async def _aio_try(self, method: Method[Req, Resp], request: Req) -> Resp | RpcError:
        """The answer, or the refusal: what follows from that may take calls of its own."""
        try:
            return await self._aio_call(method, request)
        except RpcError as error:
            return error

    async def _aio_list_raw(self) -> list[LoraAdapter]:
        return (await self._aio_call(LIST_LORAS, ListLorasRequest())).adapters

    async def _aio_find(self, name: str, failure: SidecarError) -> Adapter | None:
        """The adapter, if the engine holds it after a call that failed.

        Raises:
            SidecarError: The failure itself, if the engine does not say.
        """
        try:
            for adapter in await self._aio_list_raw():
                if adapter.lora_name == name:
                    return check_adapter(adapter, LIST_LORAS.name)
        except SidecarError as error:
            log.warning("lora_state_unknown", lora_name=name, reason=str(error))
            raise failure from error
        return None

    async def _aio_load_native(self, name: str, path: str) -> Adapter:
        answer = await self._aio_try(LOAD_LORA, LoadLoraRequest(lora_name=name, source_path=path))
        if isinstance(answer, RpcError):
            return await self._aio_after_failed_load(name, path, answer)
        return check_adapter(answer.adapter, LOAD_LORA.name, name=name)

    async def _aio_after_failed_load(self, name: str, path: str, error: RpcError) -> Adapter:
        if error.status is StatusCode.ALREADY_EXISTS:
            resident = await self._aio_find(name, error)
            if resident is None:
                reason = f"LoadLora says that {name!r} is loaded, but ListLoras does not list it"
                raise ProtocolError(reason) from error
            return resident
        if error.status in DEFINITIVE:
            raise error
        resident = await self._aio_find(name, error)
        if resident is None:
            raise error
        if resident.path != path:
            reason = f"LoRA adapter {name!r} was loaded from {resident.path!r} instead of {path!r}"
            raise LoraError(reason) from error
        log.info("lora_load_reconciled", lora_name=name, failure=str(error))
        return resident

    async def _aio_publish_loaded(self, adapter: Adapter) -> None:
        """Publish, or leave nothing behind (R13.25)."""
        failure = await self._aio_try_publish(adapter)
        if failure is None:
            return
        for aio_undo in (self._aio_remove_record, self._aio_unload_silently):
            try:
                await aio_undo(adapter.name)
            except SidecarError as error:
                log.warning("lora_not_undone", lora_name=adapter.name, reason=str(error))
        raise failure

    async def _aio_try_publish(self, adapter: Adapter) -> SidecarError | None:
        try:
            await self.records.aio_publish(adapter)
        except SidecarError as error:
            return error
        return None

    async def _aio_remove_record(self, name: str) -> None:
        await self.records.aio_unpublish(name)

    async def _aio_unload_silently(self, name: str) -> None:
        await self._aio_call(UNLOAD_LORA, UnloadLoraRequest(lora_name=name))

    async def _aio_unload_native(self, name: str, published: Adapter | None) -> None:
        answer = await self._aio_try(UNLOAD_LORA, UnloadLoraRequest(lora_name=name))
        if isinstance(answer, RpcError):
            await self._aio_after_failed_unload(name, published, answer)
        elif answer.adapter is None or answer.adapter.lora_name != name or answer.adapter.lora_id <= 0:
            reason = f"UnloadLora did not return the adapter {name!r}"
            raise ProtocolError(reason)

    async def _aio_after_failed_unload(self, name: str, published: Adapter | None, error: RpcError) -> None:
        if error.status is StatusCode.NOT_FOUND:
            return
        if error.status not in DEFINITIVE and await self._aio_find(name, error) is None:
            log.info("lora_unload_reconciled", lora_name=name, failure=str(error))
            return
        if published is not None:
            failure = await self._aio_try_publish(published)
            if failure is not None:
                log.warning("lora_not_restored", lora_name=name, reason=str(failure))
        raise error

    # -- Reconciliation ---------------------------------------------------------------------------------------------

    async def _aio_reconcile_if_needed(self) -> None:
        if self.reconciled:
            return
        try:
            await self._aio_reconcile()
        except SidecarError as error:
            log.warning("lora_not_reconciled", reason=str(error))

    async def _aio_reconcile(self) -> None:
        await self.records.aio_clear_leftovers()
        adapters = await self._aio_list_raw()
        conflict: ProtocolError | None = None
        inventory: dict[str, Adapter]
        try:
            inventory = validated_inventory(adapters)
            check_publishable(inventory, self._settings.base_names)
        except ProtocolError as error:
            # Which of them a request would reach is anybody's guess, so it reaches none (R13.30).
            conflict, inventory = error, {}
        for name in self.records.names():
            if self.records.find(name) != inventory.get(name):
                await self.records.aio_unpublish(name)
        if conflict is not None:
            raise conflict
        for adapter in inventory.values():
            await self.records.aio_publish(adapter)
        self.reconciled = True
        log.info("lora_reconciled", adapters=len(inventory))


def _success(message: str, name: str, adapter_id: int) -> Answer:
    return {"status": "success", "message": message, "lora_name": name, "lora_id": adapter_id}


def _failure(message: str, body: object) -> Answer:
    name = body.get("lora_name") if isinstance(body, dict) else None
    return {"status": "error", "message": message, "lora_name": name if isinstance(name, str) else None}
