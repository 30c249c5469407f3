"""The adapters of one engine (wire-and-server 6.4); asyncio-flavoured, no import of vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import structlog

from trio_sidecar.bridge import AioLock
from trio_sidecar.engines.vllm_binding import status_of
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import LoraAdapter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["LoraLoader", "LoraRegistry", "local_path"]

PREFIXES_VARIABLE = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"

log = structlog.get_logger("trio_sidecar.engines.vllm")


class LoraLoader(Protocol):
    """The engine's side."""

    async def aio_add_lora(self, adapter: LoraAdapter) -> bool:
        """Load an adapter on every rank; whether all did."""
        ...

    async def aio_remove_lora(self, adapter: LoraAdapter) -> bool:
        """Remove an adapter from every rank; whether all did."""
        ...


class LoraRegistry:
    """Adapters by name; loads and unloads one at a time."""

    def __init__(self, loader: LoraLoader, base_names: Collection[str]) -> None:
        self._loader = loader
        self._base_names = frozenset(base_names)
        self._adapters: dict[str, LoraAdapter] = {}
        self._last_id = 0
        self._lock = AioLock()

    def find(self, name: str) -> LoraAdapter | None:
        """The adapter of that name."""
        return self._adapters.get(name)

    def adapters(self) -> list[LoraAdapter]:
        """All adapters, by name."""
        return [self._adapters[name] for name in sorted(self._adapters)]

    async def aio_load(self, name: str, path: str, *, trusted: bool = False) -> LoraAdapter:
        """Load an adapter.

        Args:
            name: What requests will call it.
            path: A directory or a repository.
            trusted: The path comes from the command line, so any will do.

        Raises:
            RpcError: As the table of the specification says.
        """
        if not name.strip():
            _refuse("lora_name is blank")
        if not path.strip():
            _refuse("source_path is blank")
        if not trusted:
            path = local_path(path, os.environ.get(PREFIXES_VARIABLE))
        async with self._lock:
            if name in self._base_names:
                _refuse(f"lora_name {name!r} is a name of the base model", StatusCode.ALREADY_EXISTS)
            if name in self._adapters:
                _refuse(f"lora_name {name!r} is loaded already; unload it first", StatusCode.ALREADY_EXISTS)
            self._last_id += 1
            adapter = LoraAdapter(lora_id=self._last_id, lora_name=name, source_path=path)
            try:
                loaded = await self._loader.aio_add_lora(adapter)
            except Exception as error:
                detail = status_of(error).detail
                raise RpcError(StatusCode.INTERNAL, f"LoadLora {name!r} failed: {detail}") from error
            if not loaded:
                _refuse(f"LoadLora {name!r} failed: the engine refused it", StatusCode.INTERNAL)
            self._adapters[name] = adapter
            log.info("lora_loaded", lora_name=name, lora_id=adapter.lora_id)
            return adapter

    async def aio_unload(self, name: str) -> LoraAdapter:
        """Unload an adapter.

        Raises:
            RpcError: As the table of the specification says.
        """
        if not name.strip():
            _refuse("lora_name is blank")
        async with self._lock:
            adapter = self._adapters.get(name)
            if adapter is None:
                _refuse(f"lora_name {name!r} is not loaded", StatusCode.NOT_FOUND)
            try:
                removed = await self._loader.aio_remove_lora(adapter)
            except Exception as error:
                detail = status_of(error).detail
                raise RpcError(StatusCode.INTERNAL, f"UnloadLora {name!r} failed: {detail}") from error
            if not removed:
                _refuse(f"UnloadLora {name!r} failed: the engine refused it", StatusCode.INTERNAL)
            del self._adapters[name]
            log.info("lora_unloaded", lora_name=name, lora_id=adapter.lora_id)
            return adapter

    async def aio_reload(self, adapters: Sequence[LoraAdapter]) -> None:
        """Load adapters of an earlier engine again, with the ids that they had.

        Raises:
            RpcError: The engine refused one.
        """
        async with self._lock:
            for adapter in adapters:
                try:
                    loaded = await self._loader.aio_add_lora(adapter)
                except Exception as error:
                    raise status_of(error) from error
                if not loaded:
                    _refuse(f"the engine refused adapter {adapter.lora_name!r}", StatusCode.INTERNAL)


def local_path(path: str, prefixes: str | None) -> str:
    """The path to load from: repositories as they are, local ones with their links resolved.

    Args:
        path: From a client, who must not make the engine read any file it likes.
        prefixes: Directories that clients may name, separated by colons or commas; None or empty for none.

    Raises:
        RpcError: INVALID_ARGUMENT, the path is local and not allowed; INTERNAL, a prefix is missing.
    """
    looks_local = path.startswith(("/", "~", ".")) or ".." in path or Path(path).exists()
    if not looks_local:
        return path
    allowed = [prefix for prefix in (prefixes or "").replace(",", os.pathsep).split(os.pathsep) if prefix.strip()]
    if not allowed:
        _refuse(f"source_path {path!r} is local, and {PREFIXES_VARIABLE} allows no local path")
    if not Path(path).is_absolute():
        _refuse(f"source_path {path!r} must be absolute")
    try:
        resolved = Path(path).resolve(strict=True)
    except OSError as error:
        _refuse(f"source_path {path!r} cannot be read: {error.strerror or error}")
    roots = []
    for prefix in allowed:
        try:
            roots.append(Path(prefix.strip()).resolve(strict=True))
        except OSError as error:
            raise RpcError(StatusCode.INTERNAL, f"{PREFIXES_VARIABLE}: {prefix!r} does not exist") from error
    if not any(resolved.is_relative_to(root) for root in roots):
        _refuse(f"source_path {path!r} is outside {PREFIXES_VARIABLE}")
    return str(resolved)


def _refuse(reason: str, status: StatusCode = StatusCode.INVALID_ARGUMENT) -> NoReturn:
    raise RpcError(status, reason)
