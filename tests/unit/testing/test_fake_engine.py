"""The scripted engine does what its script says, since users' tests rest on it."""

from __future__ import annotations

import pytest
import trio

from trio_sidecar import wire
from trio_sidecar.bridge import aio_now, run_aio
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens
from trio_sidecar.wire import methods


async def aio_play(engine: FakeEngine, request: wire.GenerateRequest | None = None) -> list[tuple[float, list[int]]]:
    """All batches, with the time since the start and the ids in each."""
    start = aio_now()
    batches = []
    async with engine.aio_generate(request or wire.GenerateRequest(), {"key": "value"}) as stream:
        while responses := await stream.aio_receive():
            ids = [i for response in responses if response.outputs for i in response.outputs.token_ids]
            batches.append((aio_now() - start, ids))
    return batches


async def test_steps_in_order(aio_loop: object, autojump_clock: object) -> None:
    """Steps are played in order and in virtual time; the observations say what happened."""
    engine = FakeEngine(
        Script(
            opening=(Wait(1),),
            stream=(Send(tokens(1), tokens(2)), Wait(2), Send(finish(3, total=3))),
            closing=(Wait(4),),
        )
    )
    start = trio.current_time()
    assert [(1.0, [1, 2]), (3.0, [3])] == await run_aio(aio_play, engine)
    [seen] = engine.requests
    assert (True, True, 3, 3) == (seen.opened, seen.released, seen.reads, seen.sent)
    assert {"key": "value"} == seen.metadata
    assert pytest.approx(start + 7) == seen.released_at


async def test_gate_and_failure(aio_loop: object, autojump_clock: object) -> None:
    """A gate holds every request up until it is opened; a failure is raised where the script says."""
    gate = Gate()
    engine = FakeEngine(Script(stream=(gate, Fail(RpcError(StatusCode.INTERNAL, "broken")))))

    async def play() -> None:
        with pytest.raises(RpcError, match="broken"):
            await run_aio(aio_play, engine)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        await trio.sleep(1)
        assert 1 == engine.open_streams
        gate.open()
    assert 0 == engine.open_streams


async def test_failure_at_open(aio_loop: object, autojump_clock: object) -> None:
    """A failure in the opening keeps the stream from opening and counts as released."""
    engine = FakeEngine(Script(opening=(Fail(RpcError(StatusCode.UNAVAILABLE, "no")),)))
    with pytest.raises(RpcError, match="no"):
        await run_aio(aio_play, engine)
    assert [(False, True)] == [(request.opened, request.released) for request in engine.requests]


async def test_script_by_request(aio_loop: object, autojump_clock: object) -> None:
    """A function may pick the script; Send does not belong into an opening."""

    def pick(request: wire.GenerateRequest) -> Script:
        return Script(stream=(Send(tokens(1)),)) if request.model == "good" else Script(opening=(Send(tokens(1)),))

    engine = FakeEngine(pick)
    assert [(0.0, [1])] == await run_aio(aio_play, engine, wire.GenerateRequest(model="good"))
    with pytest.raises(ValueError, match="Send"):
        await run_aio(aio_play, engine, wire.GenerateRequest(model="bad"))


async def test_calls(aio_loop: object) -> None:
    """Unary calls are answered from the table: a message, an error, a function of the request; else UNIMPLEMENTED."""
    info = wire.ModelInfo(served_model_name="m")
    engine = FakeEngine(
        answers={
            "GetModelInfo": info,
            "Sleep": RpcError(StatusCode.INTERNAL, "no"),
            "LoadLora": lambda request: (
                wire.LoadLoraResponse() if request.lora_name else RpcError(StatusCode.NOT_FOUND, "?")
            ),
            "IsPaused": info,
        }
    )
    assert info is await run_aio(engine.aio_call, methods.GET_MODEL_INFO, wire.GetModelInfoRequest())
    with pytest.raises(RpcError, match="no"):
        await run_aio(engine.aio_call, methods.SLEEP, wire.SleepRequest())
    with pytest.raises(RpcError, match="NotFound"):
        await run_aio(engine.aio_call, methods.LOAD_LORA, wire.LoadLoraRequest())
    with pytest.raises(RpcError, match="Unimplemented"):
        await run_aio(engine.aio_call, methods.WAKE_UP, wire.WakeUpRequest())
    with pytest.raises(AssertionError, match="must be a IsPausedResponse"):
        await run_aio(engine.aio_call, methods.IS_PAUSED, wire.IsPausedRequest())
    assert ["GetModelInfo", "Sleep", "LoadLora", "WakeUp", "IsPaused"] == [name for name, _ in engine.calls]


async def test_health(aio_loop: object) -> None:
    """Health comes from the table; a service without an entry is NOT_FOUND."""
    serving = wire.HealthCheckResponseServingStatus.SERVING
    engine = FakeEngine(health={"": serving})
    assert serving is await run_aio(engine.aio_check_health, "")
    with pytest.raises(RpcError, match="NotFound"):
        await run_aio(engine.aio_check_health, "vllm.Control")
