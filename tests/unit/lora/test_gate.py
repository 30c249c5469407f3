"""The engine behind the gate: what passes through it, unchanged, and what does not (spec 7.14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest

from support.lora import lifecycle, lora
from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.errors import InvalidRequest
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


async def aio_open(gate: AdapterGate, request: wire.GenerateRequest, metadata: dict[str, str]) -> None:
    async with gate.aio_generate(request, metadata):
        pass


@pytest.mark.rule("R7.77")
@pytest.mark.parametrize("adapter", ["", "math-r8"])
async def test_requests_pass_as_they_are(aio_loop: asyncio.AbstractEventLoop, adapter: str) -> None:
    """The engine gets request and metadata, whether the request is for the base model or for a published adapter."""
    scene = lifecycle(lora("math-r8"))
    await run_aio(scene.manager.aio_reconcile)
    gate = AdapterGate(scene.engine, scene.manager.records, scene.manager.locks)
    request = wire.GenerateRequest(request_id="r", lora_name=adapter)
    await run_aio(aio_open, gate, request, {"x-trace": "1"})
    [received] = scene.engine.requests
    assert request is received.request
    assert {"x-trace": "1"} == received.metadata


@pytest.mark.rule("R7.77")
async def test_an_adapter_that_is_not_published_is_refused(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Though the engine has it, which is not asked."""
    scene = lifecycle(lora("math-r8"))
    gate = AdapterGate(scene.engine, scene.manager.records, scene.manager.locks)
    refusal = "InvalidRequest: unknown model 'math-r8': no LoRA adapter of that name is published by this worker"
    with pytest.raises(InvalidRequest) as caught:
        await run_aio(aio_open, gate, wire.GenerateRequest(lora_name="math-r8"), {})
    assert (refusal, []) == (str(caught.value), scene.engine.requests)
