"""The engine behind the gate: what passes through it unchanged (spec 7.14); requests are tried in the scenarios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.lora.gate import AdapterGate
from trio_sidecar.lora.locks import LockRegistry
from trio_sidecar.lora.records import Records
from trio_sidecar.testing.fake_engine import FakeEngine
from trio_sidecar.wire.methods import PAUSE_GENERATION

if TYPE_CHECKING:
    import asyncio


@attrs.define(eq=False)
class Notes(FakeEngine):
    """Notes what it is asked."""

    asked: list[object] = attrs.field(factory=list)

    async def aio_call(self, method: Any, request: Any) -> Any:
        """Note a call."""
        await aio_checkpoint()
        self.asked.append((method, request))
        return "the answer"

    async def aio_check_health(self, service: str) -> Any:
        """Note a question."""
        await aio_checkpoint()
        self.asked.append(service)
        return wire.HealthCheckResponseServingStatus.SERVING


def gated() -> tuple[Notes, AdapterGate]:
    engine, records = Notes(), Records()
    return engine, AdapterGate(engine, records, LockRegistry(records.is_published))


async def test_calls_pass_with_their_request(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine gets method and request as they are, the caller its answer."""
    engine, gate = gated()
    request = wire.PauseGenerationRequest(clear_cache=True)
    assert "the answer" == await run_aio(gate.aio_call, PAUSE_GENERATION, request)
    assert [(PAUSE_GENERATION, request)] == engine.asked


async def test_health_is_asked_for_the_same_service(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Whichever service it is."""
    engine, gate = gated()
    status = await run_aio(gate.aio_check_health, "vllm.Inference")
    assert (wire.HealthCheckResponseServingStatus.SERVING, ["vllm.Inference"]) == (status, engine.asked)
