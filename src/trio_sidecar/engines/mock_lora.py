"""LoRA adapters of the mock engine: a registry like vLLM's, over adapters that change nothing in the answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trio_sidecar.bridge import aio_checkpoint
from trio_sidecar.engines.vllm_lora import LoraRegistry
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    ListLorasRequest,
    ListLorasResponse,
    LoadLoraRequest,
    LoadLoraResponse,
    UnloadLoraRequest,
    UnloadLoraResponse,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    import betterproto2

    from trio_sidecar.wire import LoraAdapter

__all__ = ["MockLora"]


class MockLora:
    """The adapters of one mock engine.

    Args:
        max_loras: How many fit.
        base_names: Names that no adapter may have.
    """

    def __init__(self, max_loras: int, base_names: Collection[str]) -> None:
        self._max_loras = max_loras
        self._registry = LoraRegistry(self, base_names)

    async def aio_call(self, request: betterproto2.Message) -> betterproto2.Message | None:
        """Answer a call of the lifecycle; None if it is none.

        Raises:
            RpcError: It is refused, as vLLM refuses it.
        """
        match request:
            case LoadLoraRequest():
                return LoadLoraResponse(adapter=await self._registry.aio_load(request.lora_name, request.source_path))
            case UnloadLoraRequest():
                return UnloadLoraResponse(adapter=await self._registry.aio_unload(request.lora_name))
            case ListLorasRequest():
                return ListLorasResponse(adapters=self._registry.adapters())
        return None

    def check_loaded(self, name: str) -> None:
        """Refuse a request for an adapter that is not there.

        Raises:
            RpcError: NOT_FOUND.
        """
        if self._registry.find(name) is None:
            raise RpcError(StatusCode.NOT_FOUND, f"lora_name {name!r} is not loaded")

    async def aio_add_lora(self, adapter: LoraAdapter) -> bool:
        """Accept an adapter if there is room and its directory, if it is one of this machine, looks like one."""
        await aio_checkpoint()
        if len(self._registry.adapters()) >= self._max_loras:
            return False
        path = adapter.source_path
        return not path.startswith("/") or _looks_like_an_adapter(path)

    async def aio_remove_lora(self, adapter: LoraAdapter) -> bool:  # noqa: ARG002 - the registry forgets it
        """Let an adapter go."""
        await aio_checkpoint()
        return True


def _looks_like_an_adapter(path: str) -> bool:
    return (Path(path) / "adapter_config.json").is_file()
