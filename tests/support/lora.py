"""Stand-ins for the lifecycle of LoRA adapters: an engine that holds some, and a discovery that lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.lora import LoraManager, LoraSettings
from trio_sidecar.testing.fake_engine import FakeEngine, Gate

if TYPE_CHECKING:
    from pathlib import Path

    from trio_sidecar.lora import Adapter
    from trio_sidecar.wire.methods import Method

BASE_NAMES = frozenset({"model-source", "served-model", "model-alias"})


def lora(name: str, number: int = 1, path: str = "/adapters/any") -> wire.LoraAdapter:
    """An adapter as the engine describes it."""
    return wire.LoraAdapter(lora_id=number, lora_name=name, source_path=path)


@attrs.define(eq=False)
class LoraEngine(FakeEngine):
    """Holds adapters; generates as the script says.

    Attributes:
        adapters: What it holds.
        faults: By call, what happens instead of the answer; each is used once, in order. A message is returned, an
            error is raised, a gate is waited for and then the call goes on, ``None`` lets it pass.
        late_faults: The same, but after the call had its effect.
        rpcs: The calls of the lifecycle, in order.
    """

    adapters: dict[str, wire.LoraAdapter] = attrs.field(factory=dict)
    extra: list[wire.LoraAdapter] = attrs.field(factory=list)
    faults: dict[str, list[Any]] = attrs.field(factory=dict)
    late_faults: dict[str, list[Any]] = attrs.field(factory=dict)
    rpcs: list[str] = attrs.field(factory=list)
    next_id: int = 1

    def hold(self, *adapters: wire.LoraAdapter) -> None:
        """Have these loaded."""
        for adapter in adapters:
            self.adapters[adapter.lora_name] = adapter
            self.next_id = max(self.next_id, adapter.lora_id + 1)

    async def aio_call(self, method: Method[Any, Any], request: Any) -> Any:
        """Answer."""
        self.rpcs.append(method.name)
        await aio_checkpoint()
        for faults, act in ((self.faults, False), (self.late_faults, True)):
            answer = self._act(request) if act else None
            for fault in [faults[method.name].pop(0)] if faults.get(method.name) else []:
                if isinstance(fault, Gate):
                    await fault.aio_pass()
                elif isinstance(fault, Exception):
                    raise fault
                elif fault is not None:
                    return fault
        return answer

    def _act(self, request: Any) -> Any:
        match request:
            case wire.ListLorasRequest():
                return wire.ListLorasResponse(adapters=[*self.adapters.values(), *self.extra])
            case wire.LoadLoraRequest():
                if request.lora_name in self.adapters:
                    raise RpcError(StatusCode.ALREADY_EXISTS, "loaded already")
                adapter = lora(request.lora_name, self.next_id, request.source_path)
                self.hold(adapter)
                return wire.LoadLoraResponse(adapter=adapter)
            case _:
                if request.lora_name not in self.adapters:
                    raise RpcError(StatusCode.NOT_FOUND, "not loaded")
                return wire.UnloadLoraResponse(adapter=self.adapters.pop(request.lora_name))


@attrs.define(eq=False)
class Discovery:
    """Keeps records as Dynamo's discovery does: by suffix.

    Attributes:
        records: What is there.
        log: What was done, in order.
        failures: Raised instead of the next writes or removals, in order; None lets one pass.
        slow: What the next write waits for before it has its effect.
    """

    records: dict[str, Adapter] = attrs.field(factory=dict)
    log: list[str] = attrs.field(factory=list)
    failures: list[Exception | None] = attrs.field(factory=list)
    slow: Gate | None = None

    async def aio_publish(self, adapter: Adapter) -> None:
        """Write."""
        self.log.append(f"+{adapter.name}")
        await self._aio_fail()
        if self.slow is not None:
            await self.slow.aio_pass()
        self.records[adapter.name] = adapter

    async def aio_unpublish(self, name: str) -> None:
        """Remove."""
        self.log.append(f"-{name}")
        await self._aio_fail()
        self.records.pop(name, None)

    async def _aio_fail(self) -> None:
        await aio_checkpoint()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure


def make_adapter(directory: Path, name: str = "adapter") -> Path:
    """A directory that looks like an adapter."""
    path = directory / name
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


@attrs.define(eq=False)
class Downloads:
    """Finds local adapters, as Dynamo's downloader does.

    Attributes:
        asked: Every URI, in order.
    """

    asked: list[str] = attrs.field(factory=list)

    async def aio_download(self, uri: str) -> str:
        """The directory."""
        self.asked.append(uri)
        await aio_checkpoint()
        return uri.removeprefix("file://")


@attrs.define(eq=False)
class Lifecycle:
    """A manager with everything around it."""

    engine: LoraEngine
    discovery: Discovery
    downloads: Downloads
    manager: LoraManager

    @property
    def published(self) -> list[str]:
        """Names that requests may select."""
        return self.manager.records.names()


def lifecycle(*held: wire.LoraAdapter, attach: bool = True, **settings: Any) -> Lifecycle:
    """A manager before an engine that holds these adapters."""
    engine, discovery, downloads = LoraEngine(), Discovery(), Downloads()
    engine.hold(*held)
    options: dict[str, Any] = {"enabled": True, "supported": True, "max_loras": 4, "base_names": BASE_NAMES} | settings
    manager = LoraManager(engine, LoraSettings(**options), downloads.aio_download)
    if attach:
        manager.records.attach(discovery)
    return Lifecycle(engine, discovery, downloads, manager)


def load_body(name: str, path: Path | str) -> dict[str, Any]:
    """The body of a load."""
    return {"lora_name": name, "source": {"uri": f"file://{path}"}}
