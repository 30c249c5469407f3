"""Controls and updates over a fake engine (spec 12.1, 12.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import EngineShutdown, ErrorKind, InvalidRequest, RpcError, StatusCode
from trio_sidecar.rl import RlClient, supported_controls, supported_updates
from trio_sidecar.testing.fake_engine import FakeEngine
from trio_sidecar.wire import PauseMode, RlCapabilities

if TYPE_CHECKING:
    import asyncio

BASE_CONTROLS = ("pause_generation", "resume_generation", "is_paused", "is_sleeping", "get_weight_version")
TRANSFER = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
EVERYTHING = RlCapabilities(
    weight_transfer_enabled=True,
    weight_transfer_backend="nccl",
    sleep_mode_enabled=True,
    draft_weight_updates_enabled=True,
)


def answers(**changes: Any) -> dict[str, Any]:
    """An engine that does everything at once."""
    return {
        "PauseGeneration": wire.PauseGenerationResponse(),
        "ResumeGeneration": wire.ResumeGenerationResponse(),
        "IsPaused": wire.IsPausedResponse(paused=True),
        "Sleep": wire.SleepResponse(),
        "WakeUp": wire.WakeUpResponse(),
        "IsSleeping": wire.IsSleepingResponse(sleeping=False),
        "GetWeightVersion": wire.GetWeightVersionResponse(weight_version="step-42"),
        "InitWeightTransferEngine": wire.InitWeightTransferEngineResponse(),
        "StartWeightUpdate": wire.StartWeightUpdateResponse(),
        "StartDraftWeightUpdate": wire.StartDraftWeightUpdateResponse(),
        "UpdateWeights": wire.UpdateWeightsResponse(),
        "FinishWeightUpdate": wire.FinishWeightUpdateResponse(),
        "UpdateWeightVersion": wire.UpdateWeightVersionResponse(),
    } | changes


# -- What is offered (12.1)


def test_an_engine_without_rl_offers_nothing() -> None:
    """No capabilities, no controls and no updates."""
    assert ((), ()) == (supported_controls(None), supported_updates(None))


@pytest.mark.rule("R12.3")
def test_every_rl_engine_can_be_paused_and_asked() -> None:
    """Bare capabilities give the controls that need nothing, is_sleeping among them, and the version update."""
    bare = RlCapabilities()
    assert (BASE_CONTROLS, ("update_weight_version",)) == (supported_controls(bare), supported_updates(bare))


def test_sleep_mode_brings_sleep_and_wake_up() -> None:
    """Both controls come with sleep mode, and change no update."""
    sleepy = RlCapabilities(sleep_mode_enabled=True)
    assert (*BASE_CONTROLS, "sleep", "wake_up") == supported_controls(sleepy)
    assert ("update_weight_version",) == supported_updates(sleepy)


def test_weight_transfer_brings_its_updates() -> None:
    """The four updates of a transfer come with it, and change no control."""
    transfer = RlCapabilities(weight_transfer_enabled=True)
    assert ("update_weight_version", *TRANSFER) == supported_updates(transfer)
    assert BASE_CONTROLS == supported_controls(transfer)


@pytest.mark.rule("R12.1")
@pytest.mark.parametrize("transfer", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_draft_updates_need_both_flags(transfer: bool, draft: bool) -> None:
    """Only an engine with weight transfer and draft updates offers the draft update."""
    flags = RlCapabilities(weight_transfer_enabled=transfer, draft_weight_updates_enabled=draft)
    assert (transfer and draft) == ("start_draft_weight_update" in supported_updates(flags))


@pytest.mark.rule("R12.2")
@pytest.mark.parametrize("capabilities", [None, RlCapabilities()])
async def test_what_is_not_offered_gets_an_envelope(
    aio_loop: asyncio.AbstractEventLoop, capabilities: RlCapabilities | None
) -> None:
    """A name that is not offered is answered with an error envelope, without an engine and whatever the body."""
    client = RlClient(capabilities, None)
    assert {"status": "error", "message": "unsupported engine update: start_draft_weight_update"} == await run_aio(
        client.aio_update, "start_draft_weight_update", []
    )
    assert {"status": "error", "message": "unsupported engine control: sleep"} == await run_aio(
        client.aio_control, "sleep", {}
    )


# -- Calls and answers (12.2)

CONTROLS: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    (
        "pause_generation",
        {"mode": "keep", "clear_cache": False},
        wire.PauseGenerationRequest(mode=PauseMode.KEEP, clear_cache=False),
        {"status": "paused"},
    ),
    ("pause_generation", {}, wire.PauseGenerationRequest(mode=PauseMode.ABORT), {"status": "paused"}),
    ("is_paused", {}, wire.IsPausedRequest(), {"is_paused": True}),
    ("sleep", {"level": 2, "mode": "wait"}, wire.SleepRequest(level=2, mode=PauseMode.WAIT), {"status": "sleeping"}),
    ("sleep", {}, wire.SleepRequest(mode=PauseMode.ABORT), {"status": "sleeping"}),
    ("is_sleeping", {}, wire.IsSleepingRequest(), {"is_sleeping": False}),
    ("get_weight_version", {}, wire.GetWeightVersionRequest(), {"weight_version": "step-42"}),
]
UPDATES: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    (
        "init_weight_transfer_engine",
        {"init_info": {"master_addr": "trainer", "master_port": 1234}},
        wire.InitWeightTransferEngineRequest(init_info_json=b'{"master_addr":"trainer","master_port":1234}'),
        {"message": "Weight transfer initialized"},
    ),
    ("start_weight_update", {}, wire.StartWeightUpdateRequest(), {"message": "Weight update started"}),
    ("start_draft_weight_update", {}, wire.StartDraftWeightUpdateRequest(), {"message": "Draft weight update started"}),
    (
        "update_weights",
        {"update_info": {"names": ["layer.weight"], "shape": [4, 8]}},
        wire.UpdateWeightsRequest(update_info_json=b'{"names":["layer.weight"],"shape":[4,8]}'),
        {"message": "Weights updated"},
    ),
    (
        "finish_weight_update",
        {"weight_version": "step-42"},
        wire.FinishWeightUpdateRequest(weight_version="step-42"),
        {"message": "Weight update finished"},
    ),
    ("finish_weight_update", {}, wire.FinishWeightUpdateRequest(), {"message": "Weight update finished"}),
    (
        "update_weight_version",
        {"new_version": "step-43"},
        wire.UpdateWeightVersionRequest(weight_version="step-43"),
        {"success": True, "new_version": "step-43"},
    ),
]


@pytest.mark.rule("R12.7")
@pytest.mark.parametrize(("name", "body", "request_", "answer"), CONTROLS)
async def test_a_control_is_one_call(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: dict[str, Any], request_: Any, answer: dict[str, Any]
) -> None:
    """A control reaches the engine exactly once, with what the body says, and its answer has the documented form."""
    engine = FakeEngine(answers=answers())
    assert answer == await run_aio(RlClient(EVERYTHING, engine).aio_control, name, body)
    assert [request_] == [request for _, request in engine.calls]


@pytest.mark.rule("R12.7")
@pytest.mark.parametrize(("name", "body", "request_", "answer"), UPDATES)
async def test_an_update_is_one_call(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: dict[str, Any], request_: Any, answer: dict[str, Any]
) -> None:
    """An update reaches the engine exactly once, with what the body says, and its answer has the documented form."""
    engine = FakeEngine(answers=answers())
    assert answer == await run_aio(RlClient(EVERYTHING, engine).aio_update, name, body)
    assert [request_] == [request for _, request in engine.calls]


@pytest.mark.parametrize(
    ("sleeping", "answer"), [(False, {"status": "resumed"}), (True, {"status": "resumed", "is_sleeping": True})]
)
async def test_resuming_tells_of_an_engine_that_still_sleeps(
    aio_loop: asyncio.AbstractEventLoop,
    sleeping: bool,
    answer: dict[str, Any],
) -> None:
    """After a resume the engine is asked whether it sleeps, and the answer mentions it only if it does."""
    engine = FakeEngine(answers=answers(IsSleeping=wire.IsSleepingResponse(sleeping=sleeping)))
    assert answer == await run_aio(RlClient(EVERYTHING, engine).aio_control, "resume_generation", {})
    assert [
        ("ResumeGeneration", wire.ResumeGenerationRequest()),
        ("IsSleeping", wire.IsSleepingRequest()),
    ] == engine.calls


async def test_resuming_does_not_ask_an_engine_that_cannot_sleep(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Without sleep mode there is one call and no question."""
    engine = FakeEngine(answers=answers(IsSleeping=wire.IsSleepingResponse(sleeping=True)))
    client = RlClient(RlCapabilities(), engine)
    assert {"status": "resumed"} == await run_aio(client.aio_control, "resume_generation", {})
    assert ["ResumeGeneration"] == [name for name, _ in engine.calls]


@pytest.mark.parametrize(
    ("sleeping", "answer"), [(False, {"status": "awake"}), (True, {"status": "partially_awake", "is_sleeping": True})]
)
async def test_waking_up_may_be_partial(
    aio_loop: asyncio.AbstractEventLoop,
    sleeping: bool,
    answer: dict[str, Any],
) -> None:
    """After waking up the engine is asked whether it still sleeps, as it does if only a part was woken."""
    engine = FakeEngine(answers=answers(IsSleeping=wire.IsSleepingResponse(sleeping=sleeping)))
    assert answer == await run_aio(RlClient(EVERYTHING, engine).aio_control, "wake_up", {"tags": ["weights"]})
    assert [wire.WakeUpRequest(tags=["weights"]), wire.IsSleepingRequest()] == [request for _, request in engine.calls]


@pytest.mark.parametrize(
    ("name", "body"),
    [("pause_generation", {"mode": "stop"}), ("sleep", {"level": 3}), ("wake_up", {"tags": [1]}), ("is_paused", [])],
)
async def test_a_bad_control_body_reaches_no_engine(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: object
) -> None:
    """A body that is not allowed is refused before any call."""
    engine = FakeEngine(answers=answers())
    with pytest.raises(InvalidRequest):
        await run_aio(RlClient(EVERYTHING, engine).aio_control, name, body)
    assert [] == engine.calls


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("init_weight_transfer_engine", {}),
        ("update_weights", {"update_info": 1}),
        ("finish_weight_update", {"weight_version": 1}),
        ("update_weight_version", {"new_version": ""}),
        ("start_weight_update", "text"),
    ],
)
async def test_a_bad_update_body_reaches_no_engine(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: object
) -> None:
    """A body that is not allowed is refused before any call."""
    engine = FakeEngine(answers=answers())
    with pytest.raises(InvalidRequest):
        await run_aio(RlClient(EVERYTHING, engine).aio_update, name, body)
    assert [] == engine.calls


async def test_a_body_that_is_no_object_is_refused_by_name(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The message names the control or the update that was asked for."""
    client = RlClient(EVERYTHING, FakeEngine(answers=answers()))
    with pytest.raises(InvalidRequest, match="is_paused: the body must be a JSON object, got an array"):
        await run_aio(client.aio_control, "is_paused", [])
    with pytest.raises(InvalidRequest, match="start_weight_update: the body must be a JSON object, got an array"):
        await run_aio(client.aio_update, "start_weight_update", [])


@pytest.mark.rule("R12.7", "R4.4")
@pytest.mark.parametrize(
    ("status", "kind"),
    [(StatusCode.FAILED_PRECONDITION, ErrorKind.INVALID_ARGUMENT), (StatusCode.UNAVAILABLE, ErrorKind.CANNOT_CONNECT)],
)
async def test_a_refusal_names_the_call(
    aio_loop: asyncio.AbstractEventLoop, status: StatusCode, kind: ErrorKind
) -> None:
    """A call that the engine refuses is not repeated; the error has its kind, its message and the call's name."""
    engine = FakeEngine(answers=answers(Sleep=RpcError(status, "no sleep mode")))
    with pytest.raises(RpcError, match="Sleep: no sleep mode") as caught:
        await run_aio(RlClient(EVERYTHING, engine).aio_control, "sleep", {})
    assert (kind, 1) == (caught.value.kind, len(engine.calls))


@pytest.mark.rule("R12.8")
@pytest.mark.parametrize(
    ("name", "body", "request_"),
    [
        ("pause_generation", {"mode": "keep"}, wire.PauseGenerationRequest(mode=PauseMode.KEEP)),
        ("sleep", {"level": 2}, wire.SleepRequest(level=2, mode=PauseMode.ABORT)),
    ],
)
async def test_an_order_to_rest_is_repeated_to_an_engine_that_does_not_know_it(
    aio_loop: asyncio.AbstractEventLoop, name: str, body: dict[str, Any], request_: Any
) -> None:
    """As it was given, once, and only while the engine says that it is not paused."""
    engine = FakeEngine(answers=answers(IsPaused=wire.IsPausedResponse(paused=True)))
    client = RlClient(EVERYTHING, engine)
    before = client.quieted
    await run_aio(client.aio_quiet_again)
    assert [] == engine.calls
    await run_aio(client.aio_control, name, body)
    assert (False, True) == (before, client.quieted)
    await run_aio(client.aio_quiet_again)
    assert [request_, wire.IsPausedRequest()] == [request for _, request in engine.calls]
    engine.answers["IsPaused"] = wire.IsPausedResponse(paused=False)
    await run_aio(client.aio_quiet_again)
    assert [wire.IsPausedRequest(), request_] == [request for _, request in engine.calls[2:]]


@pytest.mark.rule("R12.8")
@pytest.mark.parametrize("name", ["pause_generation", "sleep"])
async def test_an_order_to_rest_that_fails_was_given_all_the_same(
    aio_loop: asyncio.AbstractEventLoop, name: str
) -> None:
    """Dynamo leaves the worker withdrawn until it is resumed; a body that is not allowed orders nothing."""
    refusal = RpcError(StatusCode.UNAVAILABLE, "away")
    client = RlClient(EVERYTHING, FakeEngine(answers=answers(PauseGeneration=refusal, Sleep=refusal)))
    with pytest.raises(InvalidRequest):
        await run_aio(client.aio_control, name, {"mode": "stop"})
    before = client.quieted
    with pytest.raises(RpcError):
        await run_aio(client.aio_control, name, {})
    assert (False, True) == (before, client.quieted)


@pytest.mark.rule("R12.8")
@pytest.mark.parametrize("name", ["resume_generation", "wake_up"])
@pytest.mark.parametrize("sleeping", [True, False])
async def test_an_order_to_rest_is_taken_back(aio_loop: asyncio.AbstractEventLoop, name: str, sleeping: bool) -> None:
    """By a resume and by waking up, unless the engine sleeps on."""
    engine = FakeEngine(answers=answers(IsSleeping=wire.IsSleepingResponse(sleeping=sleeping)))
    client = RlClient(EVERYTHING, engine)
    await run_aio(client.aio_control, "sleep", {})
    await run_aio(client.aio_control, name, {})
    assert sleeping is client.quieted


async def test_before_the_start_an_offered_call_is_refused(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What is offered needs a started engine."""
    with pytest.raises(EngineShutdown, match="PauseGeneration: the engine has not started"):
        await run_aio(RlClient(EVERYTHING, None).aio_control, "pause_generation", {})
