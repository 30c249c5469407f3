"""LoRA adapters in the simulation: Dynamo's side of their records, and whoever loads and unloads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar import wire
from trio_sidecar.bridge import aio_sleep

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from simulation.schedule import Update
    from trio_sidecar.wire import LoraAdapter
    from trio_sidecar.worker.engine_object import EngineObject

__all__ = ["MAX_LORAS", "EngineAdapters", "SimLlm", "Updater"]

SOURCE = Path(__file__).parent / "adapter"
MAX_LORAS = 2
RECORD_SECS = 0.002
"""What Dynamo's discovery takes for one record."""


@attrs.frozen
class Kind:
    """A member of one of Dynamo's enumerations; they can be joined."""

    name: str

    def __or__(self, other: Kind) -> Kind:
        """Both."""
        return Kind(f"{self.name}|{other.name}")


MODEL_INPUT = SimpleNamespace(Tokens="tokens")
MODEL_TYPE = SimpleNamespace(Chat=Kind("chat"), Completions=Kind("completions"), Empty=Kind(""))
WORKER_TYPE = SimpleNamespace(Aggregated="agg", Prefill="prefill", Decode="decode", Encode="encode")


@attrs.define(eq=False)
class SimLlm:
    """``dynamo.llm``: keeps the records of adapters.

    Attributes:
        records: Names that clients can select.
    """

    records: set[str] = attrs.field(factory=set)
    ModelInput: Any = MODEL_INPUT
    ModelType: Any = MODEL_TYPE
    WorkerType: Any = WORKER_TYPE
    ModelRuntimeConfig: Any = SimpleNamespace

    async def register_model(self, *positional: Any, lora_name: str, **more: Any) -> None:
        """Write a record."""
        await aio_sleep(RECORD_SECS)
        self.records.add(lora_name)

    async def unregister_model(self, *positional: Any, lora_name: str) -> None:
        """Remove one."""
        await aio_sleep(RECORD_SECS)
        self.records.discard(lora_name)

    def LoRADownloader(self) -> Any:  # noqa: N802 - Dynamo's name
        """Fetches nothing: everything is here."""
        return SimpleNamespace(download_if_needed=self._aio_download)

    async def _aio_download(self, uri: str) -> str:
        await aio_sleep(RECORD_SECS)
        return str(SOURCE)


@attrs.define(eq=False)
class EngineAdapters:
    """The adapters that one life of the engine holds."""

    held: dict[str, LoraAdapter] = attrs.field(factory=dict)
    _last: int = 0

    def answer(self, request: Any) -> Any:
        """What a call is answered; a number is the gRPC status of a refusal."""
        match request:
            case wire.ListLorasRequest():
                return wire.ListLorasResponse(adapters=list(self.held.values()))
            case wire.LoadLoraRequest(lora_name=name, source_path=path):
                if name in self.held:
                    return 6
                self._last += 1
                self.held[name] = wire.LoraAdapter(lora_id=self._last, lora_name=name, source_path=path)
                return wire.LoadLoraResponse(adapter=self.held[name])
            case wire.UnloadLoraRequest(lora_name=name):
                return wire.UnloadLoraResponse(adapter=self.held.pop(name)) if name in self.held else 5
        return None


@attrs.define(eq=False)
class Updater:
    """Whoever manages the adapters of a worker.

    Attributes:
        tasks: Updates, each in a task of its own.
    """

    note: Callable[..., None]
    tasks: list[asyncio.Task[None]] = attrs.field(factory=list)

    def start(self, update: Update, engine: EngineObject, loop: asyncio.AbstractEventLoop) -> None:
        """Send one."""
        self.tasks.append(loop.create_task(self._aio_run(update, engine)))

    async def _aio_run(self, update: Update, engine: EngineObject) -> None:
        body: dict[str, Any] = {"lora_name": update.adapter}
        if update.name == "load_lora":
            body["source"] = {"uri": f"file://{SOURCE}"}
        answer = await engine.engine_update(update.name, body)
        self.note("updated", name=update.name, adapter=update.adapter, status=answer["status"])
