"""Requests go to the ranks of this worker, and to no others."""

from __future__ import annotations

import pytest

from trio_sidecar.bridge import run_aio
from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.errors import InvalidRequest, RpcError, StatusCode
from trio_sidecar.requests.ranks import RankGate
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Script
from trio_sidecar.wire import GenerateRequest, GetModelInfoRequest, HealthCheckResponseServingStatus, ModelInfo
from trio_sidecar.wire.methods import GET_MODEL_INFO


def sent(engine: FakeEngine) -> list[str]:
    """The ranks that the engine was asked for."""
    return [request.metadata[RANK_METADATA_KEY] for request in engine.requests]


async def aio_nested(gate: RankGate, depth: int) -> None:
    """That many requests, all open at once."""
    if depth:
        async with gate.aio_generate(GenerateRequest(), {"traceparent": "kept"}):
            await aio_nested(gate, depth - 1)


async def test_a_request_without_a_rank_goes_to_the_least_loaded(aio_loop: object) -> None:
    """Four requests at once are spread over both ranks, other metadata stays, and nothing is left counted."""
    engine = FakeEngine()
    gate = RankGate(engine, range(4, 6))
    await run_aio(aio_nested, gate, 4)
    assert ["4", "5", "4", "5"] == sent(engine)
    assert "kept" == engine.requests[0].metadata["traceparent"]
    assert {4: 0, 5: 0} == gate.open


async def test_a_named_rank_counts(aio_loop: object) -> None:
    """What a router has sent to one rank makes the other the least loaded."""
    engine = FakeEngine()
    gate = RankGate(engine, range(2))

    async def aio_ask() -> None:
        async with gate.aio_generate(GenerateRequest(), {RANK_METADATA_KEY: "0"}):
            assert {0: 1, 1: 0} == gate.open
            async with gate.aio_generate(GenerateRequest(), {}):
                pass

    await run_aio(aio_ask)
    assert ["0", "1"] == sent(engine)


async def test_a_foreign_rank_is_refused(aio_loop: object) -> None:
    """The error names the rank and those that are allowed; the engine is not asked."""
    engine = FakeEngine()
    gate = RankGate(engine, range(2, 4))

    async def aio_ask() -> None:
        async with gate.aio_generate(GenerateRequest(), {RANK_METADATA_KEY: "1"}):
            pass

    with pytest.raises(InvalidRequest, match="data-parallel rank 1 is not one of this worker's; allowed are 2, 3"):
        await run_aio(aio_ask)
    assert [] == engine.requests
    assert {2: 0, 3: 0} == gate.open


async def test_a_refused_request_is_not_counted(aio_loop: object) -> None:
    """An engine that refuses leaves no load behind."""
    gate = RankGate(FakeEngine(Script(opening=[Fail(RpcError(StatusCode.UNAVAILABLE, "no"))])), range(1))
    with pytest.raises(RpcError):
        await run_aio(aio_nested, gate, 1)
    assert {0: 0} == gate.open


async def test_calls_and_health_pass(aio_loop: object) -> None:
    """Only requests have ranks."""
    serving = HealthCheckResponseServingStatus.SERVING
    engine = FakeEngine(answers={"GetModelInfo": ModelInfo(model_id="m")}, health={"": serving})
    gate = RankGate(engine, range(1))
    request = GetModelInfoRequest()
    assert ModelInfo(model_id="m") == await run_aio(gate.aio_call, GET_MODEL_INFO, request)
    assert request is engine.calls[0][1]
    assert serving == await run_aio(gate.aio_check_health, "")
