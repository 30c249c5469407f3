"""Which adapters this worker has in discovery (spec 13.6); asyncio-flavoured.

How a record is written is the publisher's business; what may be written is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog

from trio_sidecar.errors import EngineShutdown
from trio_sidecar.lora.inventory import discovery_suffix
from trio_sidecar.lora.requests import LoraError

if TYPE_CHECKING:
    from trio_sidecar.lora.inventory import Adapter

__all__ = ["Publisher", "Records"]

log = structlog.get_logger("trio_sidecar.lora")


class Publisher(Protocol):
    """Writes and removes discovery records of this worker's instance; see ``worker.lora``."""

    async def aio_publish(self, adapter: Adapter) -> None:
        """Write the adapter's record, a copy of the base model's in all but name and adapter (R13.21).

        Raises:
            Exception: It could not be written.
        """
        ...

    async def aio_unpublish(self, name: str) -> None:
        """Remove the record of that adapter.

        Raises:
            Exception: It could not be removed.
        """
        ...


class Records:
    """The adapters in discovery, by name; empty until :meth:`attach`."""

    def __init__(self) -> None:
        self._publisher: Publisher | None = None
        self._published: dict[str, Adapter] = {}
        self._leftovers: dict[str, Adapter] = {}
        self._withdrawn = False

    @property
    def ready(self) -> bool:
        """Whether records can be written."""
        return self._publisher is not None

    def attach(self, publisher: Publisher) -> None:
        """The endpoint exists: records can be written from now on."""
        self._publisher = publisher

    def names(self) -> list[str]:
        """The adapters that requests may select."""
        return sorted(self._published)

    def find(self, name: str) -> Adapter | None:
        """The published adapter of exactly that name."""
        return self._published.get(name)

    def is_published(self, name: str) -> bool:
        """Whether requests may select it."""
        return name in self._published

    async def aio_publish(self, adapter: Adapter) -> None:
        """Write a record; does nothing if the same one is there.

        Raises:
            EngineShutdown: The endpoint is not ready, or the worker is shutting down.
            LoraError: Another adapter has the suffix (R13.22), or the record could not be written.
        """
        publisher = self._ready_publisher()
        if self._published.get(adapter.name) == adapter:
            return
        suffix = discovery_suffix(adapter.name)
        for other in (*self._published, *self._leftovers):
            if other != adapter.name and discovery_suffix(other) == suffix:
                reason = f"discovery record collision: {other!r} is published with the suffix of {adapter.name!r}"
                raise LoraError(reason)
        # A record that was perhaps written must be known, so that it can be removed.
        self._leftovers[adapter.name] = adapter
        try:
            await publisher.aio_publish(adapter)
        except Exception as error:
            reason = f"failed to publish the LoRA adapter {adapter.name!r}: {error}"
            raise LoraError(reason) from error
        self._leftovers.pop(adapter.name, None)
        self._published[adapter.name] = adapter
        if self._withdrawn:  # meanwhile
            await self.aio_unpublish(adapter.name)
            self._ready_publisher()
        log.info("lora_published", lora_name=adapter.name, lora_id=adapter.adapter_id)

    async def aio_unpublish(self, name: str) -> bool:
        """Remove the record of exactly that adapter (R13.23).

        Requests cannot select it from this call on, even if the record could not be removed.

        Returns:
            Whether there was one.

        Raises:
            LoraError: It could not be removed; the next :meth:`aio_clear_leftovers` tries again.
        """
        adapter = self._published.pop(name, None) or self._leftovers.get(name)
        if adapter is None:
            return False
        assert self._publisher is not None  # noqa: S101 - something was published
        self._leftovers[name] = adapter
        try:
            await self._publisher.aio_unpublish(name)
        except Exception as error:
            reason = f"failed to unpublish the LoRA adapter {name!r}: {error}"
            raise LoraError(reason) from error
        self._leftovers.pop(name, None)
        log.info("lora_unpublished", lora_name=name)
        return True

    async def aio_clear_leftovers(self) -> None:
        """Remove records whose writing or removal failed earlier.

        Raises:
            LoraError: One could not be removed.
        """
        for name in tuple(self._leftovers):
            await self.aio_unpublish(name)

    async def aio_withdraw(self) -> None:
        """Remove all records, for good; failures are logged (R11.5)."""
        self._withdrawn = True
        await self.aio_unpublish_all()

    async def aio_unpublish_all(self) -> None:
        """Remove all records for now; failures are logged."""
        for name in (*self._published, *self._leftovers):
            try:
                await self.aio_unpublish(name)
            except LoraError as error:
                log.warning("lora_not_unpublished", lora_name=name, reason=str(error))

    def _ready_publisher(self) -> Publisher:
        if self._publisher is None:
            reason = "LoRA adapters cannot be published before the endpoint is ready"
            raise EngineShutdown(reason)
        if self._withdrawn:
            reason = "the worker is shutting down; no LoRA adapter is published any more"
            raise EngineShutdown(reason)
        return self._publisher
