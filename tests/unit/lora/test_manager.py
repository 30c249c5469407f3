"""Loading, unloading, listing and reconciling adapters, in virtual time (spec 13.4 to 13.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from support.lora import Discovery, Lifecycle, lifecycle, load_body, lora, make_adapter
from trio_sidecar import wire
from trio_sidecar.bridge import AioEvent, aio_sleep, run_aio
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.lora import LoraManager, LoraSettings
from trio_sidecar.testing.fake_engine import Gate

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from trio.testing import MockClock

LIST, LOAD, UNLOAD = "ListLoras", "LoadLora", "UnloadLora"
AMBIGUOUS = (StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED, StatusCode.UNKNOWN)
REFUSALS = (StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION)


async def update(scene: Lifecycle, name: str, body: Any = None) -> dict[str, Any]:
    return await run_aio(scene.manager.aio_update, name, {} if body is None else body)


async def load(scene: Lifecycle, name: str, path: Path | str) -> dict[str, Any]:
    return await update(scene, "load_lora", load_body(name, path))


async def unload(scene: Lifecycle, name: str) -> dict[str, Any]:
    return await update(scene, "unload_lora", {"lora_name": name})


async def reconciled(*held: wire.LoraAdapter, **settings: Any) -> Lifecycle:
    """A scene whose first listing is over; calls and log are empty again."""
    scene = lifecycle(*held, **settings)
    await run_aio(scene.manager.aio_reconcile)
    assert scene.manager.reconciled
    scene.engine.rpcs.clear()
    scene.discovery.log.clear()
    return scene


def refusal(status: StatusCode) -> RpcError:
    return RpcError(status, "injected")


# -- What is offered


@pytest.mark.rule("R13.12", "R13.13")
@pytest.mark.parametrize(
    ("enabled", "supported", "max_loras", "offered"),
    [(False, True, 4, False), (True, False, 4, False), (True, True, 0, False), (True, True, 4, True)],
)
async def test_the_lifecycle_is_offered_where_it_can_work(
    aio_loop: asyncio.AbstractEventLoop,
    enabled: bool,
    supported: bool,
    max_loras: int,
    offered: bool,
) -> None:
    """Flag, support and capacity together; otherwise no name is offered and a call gets an error envelope."""
    scene = lifecycle(enabled=enabled, supported=supported, max_loras=max_loras)
    assert (("load_lora", "unload_lora", "list_loras") if offered else ()) == scene.manager.supported_updates()
    answer = await update(scene, "list_loras")
    assert ("success" if offered else "error") == answer["status"]
    if not offered:
        assert "not enabled" in answer["message"]
        assert [] == scene.engine.rpcs


@pytest.mark.rule("R13.14")
@pytest.mark.parametrize("name", ["load_lora", "unload_lora", "list_loras"])
async def test_nothing_works_before_the_endpoint_is_ready(aio_loop: asyncio.AbstractEventLoop, name: str) -> None:
    """Without an endpoint there is nowhere to publish to, so the engine is not asked."""
    scene = lifecycle(lora("a"), attach=False)
    answer = await update(scene, name, load_body("a", "/adapters/a"))
    assert ("error", "a") == (answer["status"], answer["lora_name"])
    assert "not ready" in answer["message"]
    await run_aio(scene.manager.aio_reconcile)
    assert [] == scene.engine.rpcs


async def test_an_engine_that_has_not_started_is_named(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A call before the start is an envelope too."""
    settings = LoraSettings(enabled=True, supported=True, max_loras=1, base_names=frozenset())
    manager = LoraManager(None, settings, pytest.fail)
    manager.records.attach(Discovery())
    assert "ListLoras: the engine has not started" in str(await run_aio(manager.aio_update, "list_loras", {}))


async def test_other_names_are_refused(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An update that is none of the three is an envelope."""
    answer = await update(lifecycle(), "swap_lora")
    assert {"status": "error", "message": "unsupported engine update: swap_lora", "lora_name": None} == answer


@pytest.mark.rule("R13.2")
async def test_bad_bodies_reach_no_engine(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The envelope says what is wrong, and repeats the name only if it is one."""
    scene = await reconciled()
    for body, name in (({"lora_name": 1}, None), ({"lora_name": "a"}, "a"), ([], None)):
        answer = await update(scene, "load_lora", body)
        assert ("error", name) == (answer["status"], answer["lora_name"])
        assert answer["message"].startswith("InvalidRequest: ")
    assert [] == scene.engine.rpcs


# -- Loading


async def test_loading_makes_an_adapter_selectable(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """The engine gets the canonical path, discovery the engine's id, the caller both names."""
    scene = await reconciled()
    scene.engine.next_id = 7
    path = make_adapter(tmp_path)
    answer = await load(scene, " math-r8 ", path)
    message = answer.pop("message")
    assert {"status": "success", "lora_name": "math-r8", "lora_id": 7, "hot_swap": False} == answer
    assert "math-r8" in message
    assert [LIST, LOAD] == scene.engine.rpcs
    assert str(path.resolve()) == scene.engine.adapters["math-r8"].source_path
    assert 7 == scene.discovery.records["math-r8"].adapter_id
    assert (["math-r8"], True) == (scene.published, scene.manager.reconciled)


async def test_loading_a_resident_adapter_changes_nothing(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Whatever source is given, it is not even fetched; the engine's id comes back."""
    scene = await reconciled(lora("a", 3))
    answer = await load(scene, "a", "/nowhere")
    assert ("success", "a", 3, False) == tuple(answer[key] for key in ("status", "lora_name", "lora_id", "hot_swap"))
    assert ([LIST], [], []) == (scene.engine.rpcs, scene.downloads.asked, scene.discovery.log)


async def test_a_resident_adapter_that_is_not_published_gets_published(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Loaded behind the worker's back, it becomes selectable when somebody asks for it."""
    scene = await reconciled()
    scene.engine.hold(lora("a", 3))
    assert "success" == (await load(scene, "a", "/nowhere"))["status"]
    assert ["a"] == scene.published


@pytest.mark.rule("R13.9")
async def test_hot_swap_is_refused(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Whoever wants it is told, instead of being left with the old weights."""
    scene = await reconciled(lora("a", 3), hot_swap=True)
    answer = await load(scene, "a", "/nowhere")
    assert "error" == answer["status"]
    assert "hot swap is not supported" in answer["message"]
    assert ([LIST], ["a"]) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.10")
async def test_a_full_engine_is_refused(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Before anything is fetched; one less and it works."""
    scene = await reconciled(lora("a", 1), lora("b", 2), max_loras=2)
    path = make_adapter(tmp_path)
    assert "capacity of 2" in (await load(scene, "c", path))["message"]
    assert ([LIST], []) == (scene.engine.rpcs, scene.downloads.asked)
    await unload(scene, "b")
    assert "success" == (await load(scene, "c", path))["status"]


@pytest.mark.rule("R13.6", "R13.7")
@pytest.mark.parametrize(("name", "named"), [("model-alias", "base model"), ("Math-R8", "'math-r8'")])
async def test_clashing_names_are_refused(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, name: str, named: str
) -> None:
    """A base name, or a suffix that another adapter has, reaches no engine."""
    scene = await reconciled(lora("math-r8"))
    answer = await load(scene, name, make_adapter(tmp_path))
    assert ("error", name) == (answer["status"], answer["lora_name"])
    assert named in answer["message"]
    assert ([LIST], []) == (scene.engine.rpcs, scene.downloads.asked)


@pytest.mark.rule("R13.4")
async def test_a_source_without_an_adapter_reaches_no_engine(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """What was fetched is checked before the engine is asked."""
    scene = await reconciled()
    assert "adapter_config.json" in (await load(scene, "a", tmp_path))["message"]
    assert [LIST] == scene.engine.rpcs


@pytest.mark.rule("R13.15")
async def test_loading_needs_a_valid_inventory(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Beside adapters that cannot be told apart nothing is loaded."""
    scene = await reconciled()
    scene.engine.hold(lora("x", 1), lora("y", 1))
    assert "id 1 twice" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert [LIST] == scene.engine.rpcs


@pytest.mark.rule("R13.8")
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (wire.LoadLoraResponse(), "without an adapter"),
        (wire.LoadLoraResponse(adapter=lora("b")), "expected 'a'"),
        (wire.LoadLoraResponse(adapter=lora("a", 0)), "lora_id 0"),
    ],
)
async def test_ids_come_from_the_engine_only(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, answer: wire.LoadLoraResponse, named: str
) -> None:
    """An answer without a usable adapter is an error, and leaves nothing published and the state in doubt."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [answer]
    assert named in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert ([], False) == (scene.published, scene.manager.reconciled)


@pytest.mark.rule("R13.17")
@pytest.mark.parametrize("status", [*REFUSALS, StatusCode.NOT_FOUND])
async def test_a_definitive_refusal_of_a_load_is_final(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, status: StatusCode
) -> None:
    """The engine is not asked again; the error names the call."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [refusal(status)]
    assert "LoadLora: injected" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert ([LIST, LOAD], []) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.17", "R13.18")
@pytest.mark.parametrize("status", AMBIGUOUS)
async def test_a_load_that_had_its_effect_succeeds(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, status: StatusCode
) -> None:
    """After an ambiguous failure the engine is asked, and an adapter from the same path counts."""
    scene = await reconciled()
    scene.engine.late_faults[LOAD] = [refusal(status)]
    answer = await load(scene, "a", make_adapter(tmp_path))
    assert ("success", 1) == (answer["status"], answer["lora_id"])
    assert ([LIST, LOAD, LIST], ["a"]) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.18")
async def test_a_load_that_found_another_source_fails(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Somebody else loaded the name meanwhile, from elsewhere: both paths are named."""
    scene = await reconciled()
    scene.engine.faults = {
        LIST: [None, wire.ListLorasResponse(adapters=[lora("a", 9, "/elsewhere")])],
        LOAD: [refusal(StatusCode.UNAVAILABLE)],
    }
    path = make_adapter(tmp_path)
    message = (await load(scene, "a", path))["message"]
    assert "/elsewhere" in message
    assert str(path.resolve()) in message
    assert [] == scene.published


@pytest.mark.rule("R13.18")
@pytest.mark.parametrize("status", AMBIGUOUS)
async def test_a_load_without_effect_fails_as_it_did(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, status: StatusCode
) -> None:
    """If the engine does not list the adapter, the first error stands."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [refusal(status)]
    assert "LoadLora: injected" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert ([LIST, LOAD, LIST], []) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.18")
async def test_a_load_of_unknown_effect_fails_as_it_did(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """If the engine does not answer the question either, the first error stands and the state is in doubt."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [refusal(StatusCode.INTERNAL)]
    scene.engine.faults[LIST] = [None, refusal(StatusCode.UNAVAILABLE)]
    assert "LoadLora: injected" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert not scene.manager.reconciled


@pytest.mark.rule("R13.19")
async def test_a_load_of_what_exists_already_succeeds(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """The engine says so and lists it: its id counts, whatever the path."""
    scene = await reconciled()
    scene.engine.faults[LIST] = [wire.ListLorasResponse()]
    scene.engine.hold(lora("a", 5, "/elsewhere"))
    answer = await load(scene, "a", make_adapter(tmp_path))
    assert ("success", 5) == (answer["status"], answer["lora_id"])
    assert ([LIST, LOAD, LIST], ["a"]) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.19")
async def test_a_load_of_what_exists_but_is_not_listed_fails(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """An engine that contradicts itself is at fault."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [refusal(StatusCode.ALREADY_EXISTS)]
    assert "does not list it" in (await load(scene, "a", make_adapter(tmp_path)))["message"]


@pytest.mark.rule("R13.25")
async def test_a_load_that_cannot_be_published_leaves_nothing(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """The record is removed if it was written after all, the adapter is unloaded, and the error returned."""
    scene = await reconciled()
    scene.discovery.failures = [ConnectionError("discovery is down")]
    assert "discovery is down" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert [LIST, LOAD, UNLOAD] == scene.engine.rpcs
    assert ["+a", "-a"] == scene.discovery.log
    assert ({}, []) == (scene.engine.adapters, scene.published)


@pytest.mark.rule("R13.25")
async def test_a_load_that_cannot_be_undone_still_says_why(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Failures of the clean-up are logged, not returned; the next call clears the record away and publishes again."""
    scene = await reconciled()
    scene.discovery.failures = [ConnectionError("first"), ConnectionError("second")]
    scene.engine.faults[UNLOAD] = [refusal(StatusCode.INTERNAL)]
    assert "first" in (await load(scene, "a", make_adapter(tmp_path)))["message"]
    assert {"a": 1} == (await update(scene, "list_loras"))["loras"]
    assert ["+a", "-a", "-a", "+a"] == scene.discovery.log
    assert ["a"] == scene.published


# -- Unloading


@pytest.mark.rule("R13.26")
async def test_unloading_removes_the_record_first(aio_loop: asyncio.AbstractEventLoop) -> None:
    """No new request is routed to an adapter that is about to go."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults[UNLOAD] = [gate := Gate()]
    answer: dict[str, Any] = {}

    async def run() -> None:
        answer.update(await unload(scene, "a"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        assert ([LIST, UNLOAD], ["-a"], []) == (scene.engine.rpcs, scene.discovery.log, scene.published)
        gate.open()
    answer.pop("message")
    assert {"status": "success", "lora_name": "a", "lora_id": 3} == answer
    assert ({}, True) == (scene.engine.adapters, scene.manager.reconciled)


@pytest.mark.rule("R13.11")
async def test_unloading_what_is_not_there_names_what_is(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The message has the name and the names that could be meant."""
    scene = await reconciled(lora("b", 1), lora("a", 2))
    message = (await unload(scene, "c"))["message"]
    assert "'c' not found; available are ['a', 'b']" in message
    assert [LIST] == scene.engine.rpcs


@pytest.mark.rule("R13.3")
async def test_unloading_takes_the_name_exactly(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A resident name with a space can be removed, and its neighbour without one stays."""
    scene = await reconciled(lora("math-r8", 1), lora("math-r8 ", 2))
    assert "success" == (await unload(scene, "math-r8 "))["status"]
    assert ["math-r8"] == scene.published
    assert ["math-r8"] == list(scene.engine.adapters)


@pytest.mark.rule("R13.20")
async def test_unloading_what_is_gone_meanwhile_succeeds(aio_loop: asyncio.AbstractEventLoop) -> None:
    """NOT_FOUND is what was wanted."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults[UNLOAD] = [refusal(StatusCode.NOT_FOUND)]
    assert "success" == (await unload(scene, "a"))["status"]
    assert [] == scene.published


@pytest.mark.rule("R13.17", "R13.20")
@pytest.mark.parametrize("status", AMBIGUOUS)
async def test_an_unload_that_had_its_effect_succeeds(aio_loop: asyncio.AbstractEventLoop, status: StatusCode) -> None:
    """After an ambiguous failure the engine is asked; gone is gone."""
    scene = await reconciled(lora("a", 3))
    scene.engine.late_faults[UNLOAD] = [refusal(status)]
    assert "success" == (await unload(scene, "a"))["status"]
    assert ([LIST, UNLOAD, LIST], []) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.20", "R13.27")
@pytest.mark.parametrize("status", AMBIGUOUS)
async def test_an_unload_without_effect_restores_the_record(
    aio_loop: asyncio.AbstractEventLoop, status: StatusCode
) -> None:
    """The adapter is still there, so requests may select it again."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults[UNLOAD] = [refusal(status)]
    assert "UnloadLora: injected" in (await unload(scene, "a"))["message"]
    assert (["-a", "+a"], ["a"]) == (scene.discovery.log, scene.published)


@pytest.mark.rule("R13.17", "R13.20")
@pytest.mark.parametrize("status", REFUSALS)
async def test_a_definitive_refusal_of_an_unload_restores_the_record(
    aio_loop: asyncio.AbstractEventLoop, status: StatusCode
) -> None:
    """Without asking the engine again."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults[UNLOAD] = [refusal(status)]
    assert "UnloadLora: injected" in (await unload(scene, "a"))["message"]
    assert ([LIST, UNLOAD], ["a"]) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R13.20")
async def test_an_unload_that_fails_publishes_nothing_new(aio_loop: asyncio.AbstractEventLoop) -> None:
    """An adapter that was not published before stays so."""
    scene = await reconciled()
    scene.engine.hold(lora("a", 3))
    scene.engine.faults[UNLOAD] = [refusal(StatusCode.FAILED_PRECONDITION)]
    assert "error" == (await unload(scene, "a"))["status"]
    assert ([], []) == (scene.discovery.log, scene.published)


@pytest.mark.rule("R13.27")
async def test_an_unload_of_unknown_effect_leaves_the_record_away(aio_loop: asyncio.AbstractEventLoop) -> None:
    """If the engine cannot be reached either, the record stays away until a later list brings it back."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults = {UNLOAD: [refusal(StatusCode.UNAVAILABLE)], LIST: [None, refusal(StatusCode.UNAVAILABLE)]}
    assert "UnloadLora: injected" in (await unload(scene, "a"))["message"]
    assert (["-a"], []) == (scene.discovery.log, scene.published)
    assert {"a": 3} == (await update(scene, "list_loras"))["loras"]
    assert ["a"] == scene.published


@pytest.mark.rule("R13.8")
@pytest.mark.parametrize(
    "answer",
    [
        wire.UnloadLoraResponse(),
        wire.UnloadLoraResponse(adapter=lora("b")),
        wire.UnloadLoraResponse(adapter=lora("a", 0)),
    ],
)
async def test_an_unload_has_to_return_the_adapter(
    aio_loop: asyncio.AbstractEventLoop, answer: wire.UnloadLoraResponse
) -> None:
    """Any other answer is the engine's fault."""
    scene = await reconciled(lora("a", 3))
    scene.engine.faults[UNLOAD] = [answer]
    assert "did not return the adapter 'a'" in (await unload(scene, "a"))["message"]
    assert ([], False) == (scene.published, scene.manager.reconciled)


async def test_an_unload_whose_record_stays_is_not_done(aio_loop: asyncio.AbstractEventLoop) -> None:
    """If the record cannot be removed the engine keeps the adapter; no request reaches it until that is cleared up."""
    scene = await reconciled(lora("a", 3))
    scene.discovery.failures = [ConnectionError("discovery is down")]
    assert "discovery is down" in (await unload(scene, "a"))["message"]
    assert ([LIST], []) == (scene.engine.rpcs, scene.published)
    await update(scene, "list_loras")
    assert ["a"] == scene.published


# -- Limits


@pytest.mark.rule("R13.16")
@pytest.mark.parametrize(("slow", "answer"), [(59.9, "success"), (60.1, "error")])
async def test_a_call_has_a_minute(
    autojump_clock: MockClock, aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, slow: float, answer: str
) -> None:
    """A call that takes longer is given up and counts as DEADLINE_EXCEEDED, after which the engine is asked."""

    class SlowGate(Gate):
        async def aio_pass(self) -> None:
            await aio_sleep(slow)

    scene = await reconciled()
    scene.engine.faults[LOAD] = [SlowGate()]
    started_at = trio.current_time()
    result = await load(scene, "a", make_adapter(tmp_path))
    assert answer == result["status"]
    assert min(slow, 60.0) == pytest.approx(trio.current_time() - started_at, abs=0.01)
    if answer == "error":
        assert "LoadLora: no answer within 60 s (DeadlineExceeded)" in result["message"]
        assert [LIST, LOAD, LIST] == scene.engine.rpcs


# -- Reconciliation


@pytest.mark.rule("R13.28")
async def test_the_first_call_publishes_what_is_resident(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Adapters that the engine had before the worker came become selectable; the second call lists only."""
    scene = lifecycle(lora("b", 1), lora("a", 2))
    assert {"status": "success", "count": 2, "loras": {"a": 2, "b": 1}} == await update(scene, "list_loras")
    assert (["+a", "+b"], ["a", "b"]) == (scene.discovery.log, scene.published)
    assert [LIST, LIST] == scene.engine.rpcs
    await update(scene, "list_loras")
    assert [LIST, LIST, LIST] == scene.engine.rpcs
    assert ["+a", "+b"] == scene.discovery.log


@pytest.mark.rule("R13.28")
async def test_reconciling_drops_what_is_stale(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Records of adapters that are gone, or that have another id now, are removed."""
    scene = await reconciled(lora("gone", 1), lora("new-id", 2), lora("same", 3))
    scene.engine.adapters = {"new-id": lora("new-id", 9), "same": lora("same", 3)}
    scene.manager.reconciled = False
    await run_aio(scene.manager.aio_reconcile)
    assert ["-gone", "-new-id", "+new-id"] == scene.discovery.log
    assert 9 == scene.discovery.records["new-id"].adapter_id


@pytest.mark.rule("R13.28")
async def test_a_reconciled_state_is_not_reconciled_again(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Once is enough until something happens."""
    scene = await reconciled(lora("a"))
    await run_aio(scene.manager.aio_reconcile)
    assert [] == scene.engine.rpcs


@pytest.mark.rule("R13.30")
@pytest.mark.parametrize(
    ("held", "conflict", "other"),
    [
        ((lora("math-r8", 1), lora("Math-R8", 2)), "Math-R8", "math-r8"),
        ((lora("model-alias", 1), lora("a", 2)), "model-alias", "a"),
    ],
)
async def test_a_conflicting_inventory_publishes_nothing_until_it_is_repaired(
    aio_loop: asyncio.AbstractEventLoop, held: tuple[wire.LoraAdapter, ...], conflict: str, other: str
) -> None:
    """The names stay offered; unloading the one in the way lets the next list publish the other."""
    scene = lifecycle(*held)
    await run_aio(scene.manager.aio_reconcile)
    assert ([], False) == (scene.published, scene.manager.reconciled)
    assert 3 == len(scene.manager.supported_updates())
    assert "success" == (await unload(scene, conflict))["status"]
    assert [] == scene.published
    assert [other] == list((await update(scene, "list_loras"))["loras"])
    assert [other] == scene.published


@pytest.mark.rule("R13.30")
async def test_a_conflict_that_comes_later_withdraws_everything(aio_loop: asyncio.AbstractEventLoop) -> None:
    """What was published before the conflict does not stay."""
    scene = await reconciled(lora("a", 1))
    scene.engine.hold(lora("A", 2))
    scene.manager.reconciled = False
    await run_aio(scene.manager.aio_reconcile)
    assert (["-a"], []) == (scene.discovery.log, scene.published)


@pytest.mark.rule("R13.15")
async def test_listing_needs_a_valid_inventory(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A list that cannot be right is not handed out."""
    answer = await update(lifecycle(lora("math-r8", 1), lora("Math-R8", 2)), "list_loras")
    assert "error" == answer["status"]
    assert "same discovery suffix" in answer["message"]


@pytest.mark.rule("R13.31")
async def test_an_operation_goes_on_after_a_failed_reconciliation(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """The engine did not answer the first question, but the load works; the state stays in doubt."""
    scene = lifecycle(lora("old", 1))
    scene.engine.faults[LIST] = [refusal(StatusCode.UNAVAILABLE)]
    assert "success" == (await load(scene, "a", make_adapter(tmp_path)))["status"]
    assert (["a"], False) == (scene.published, scene.manager.reconciled)
    await update(scene, "list_loras")
    assert (["a", "old"], True) == (scene.published, scene.manager.reconciled)


@pytest.mark.rule("R13.32")
@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_an_operation_that_is_cut_off_leaves_the_state_in_doubt(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, operation: str
) -> None:
    """Nobody knows what the engine did, so the next call asks."""
    scene = await reconciled(lora("b", 5))
    gate = Gate()
    scene.engine.faults = {LOAD: [gate], UNLOAD: [gate]}
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            run = (load, scene, "a", make_adapter(tmp_path)) if operation == "load" else (unload, scene, "b")
            nursery.start_soon(*run)
            await wait_all_tasks_blocked()
            assert not scene.manager.reconciled
            scope.cancel()
    assert not scene.manager.reconciled
    await update(scene, "list_loras")
    assert (["b"], True) == (scene.published, scene.manager.reconciled)


@pytest.mark.rule("R13.32")
async def test_a_failed_load_is_followed_by_a_reconciliation(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """The next call asks the engine before anything else."""
    scene = await reconciled()
    scene.engine.late_faults[LOAD] = [refusal(StatusCode.INVALID_ARGUMENT)]
    await load(scene, "a", make_adapter(tmp_path))
    scene.engine.rpcs.clear()
    await update(scene, "list_loras")
    assert ([LIST, LIST], ["a"]) == (scene.engine.rpcs, scene.published)


# -- One at a time


@pytest.mark.rule("R13.33")
@pytest.mark.parametrize(
    ("second", "max_loras", "outcome"),
    [("Math-R8", 4, "suffix 'math-r8'"), ("other", 1, "capacity of 1"), ("other", 2, "was loaded")],
)
async def test_loads_do_not_overlap(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, second: str, max_loras: int, outcome: str
) -> None:
    """The second load asks the engine nothing until the first has ended, and then sees what that did."""
    scene = await reconciled(max_loras=max_loras)
    scene.engine.faults[LOAD] = [gate := Gate()]
    path = make_adapter(tmp_path)
    answers: list[dict[str, Any]] = []

    async def run(name: str) -> None:
        answers.append(await load(scene, name, path))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, "math-r8")
        await wait_all_tasks_blocked()
        nursery.start_soon(run, second)
        await wait_all_tasks_blocked()
        assert ([LIST, LOAD], 1) == (scene.engine.rpcs, len(scene.downloads.asked))
        gate.open()
    assert "success" == answers[0]["status"]
    assert outcome in answers[1]["message"]


@pytest.mark.rule("R13.34")
@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_requests_on_their_way_are_waited_for(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, operation: str
) -> None:
    """Whoever has the adapter's lock for reading has it to the end: only then is the engine told anything."""
    scene = await reconciled(*([lora("a")] if operation == "unload" else []))
    answers: list[dict[str, Any]] = []
    done = AioEvent()

    async def aio_hold() -> None:
        async with scene.manager.locks.aio_reading("a"):
            await done.aio_wait()

    async def run() -> None:
        path = make_adapter(tmp_path)
        answers.append(await (load(scene, "a", path) if operation == "load" else unload(scene, "a")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, aio_hold)
        await wait_all_tasks_blocked()
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        assert [LIST] == scene.engine.rpcs
        done.set()
    assert (["success"], [LIST, operation.title() + "Lora"]) == ([answers[0]["status"]], scene.engine.rpcs[:2])


# -- Discovery records


@pytest.mark.rule("R13.23")
async def test_only_the_exact_name_is_unpublished(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Another name with the same suffix would hit the wrong record."""
    scene = await reconciled(lora("math-r8"))
    assert False is await run_aio(scene.manager.records.aio_unpublish, "Math-R8")
    assert ([], ["math-r8"]) == (scene.discovery.log, scene.published)
    assert True is await run_aio(scene.manager.records.aio_unpublish, "math-r8")


@pytest.mark.rule("R13.22")
async def test_a_record_of_another_adapter_is_not_overwritten(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Two names with one suffix collide in discovery: the second is refused."""
    scene = await reconciled(lora("math-r8", 1))
    scene.engine.adapters = {"Math-R8": lora("Math-R8", 2)}
    answer = await load(scene, "Math-R8", "/nowhere")
    assert "discovery record collision" in answer["message"]
    assert ([], ["math-r8"]) == (scene.discovery.log, scene.published)


@pytest.mark.rule("R11.5")
async def test_withdrawing_removes_every_record_and_no_adapter(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A record that cannot be removed does not keep the others; the adapters stay in the engine."""
    scene = await reconciled(lora("a", 1), lora("b", 2))
    scene.discovery.failures = [ConnectionError("discovery is down")]
    await run_aio(scene.manager.records.aio_withdraw)
    assert (["-a", "-b"], ["a"]) == (scene.discovery.log, list(scene.discovery.records))
    assert ([], []) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R11.5")
async def test_nothing_is_published_after_a_withdrawal(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Neither a later load nor one that was under way leaves a record behind."""
    scene = await reconciled()
    scene.engine.faults[LOAD] = [gate := Gate()]
    answer: dict[str, Any] = {}

    async def run() -> None:
        answer.update(await load(scene, "a", make_adapter(tmp_path)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        await run_aio(scene.manager.records.aio_withdraw)
        gate.open()
    assert "shutting down" in answer["message"]
    assert ({}, {}) == (scene.discovery.records, scene.engine.adapters)


@pytest.mark.rule("R11.5")
async def test_a_record_that_is_being_written_goes_with_the_others(aio_loop: asyncio.AbstractEventLoop) -> None:
    """A write that discovery finishes only after the withdrawal is undone."""
    scene = lifecycle(lora("a"))
    scene.discovery.slow = gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, scene.manager.aio_reconcile)
        await wait_all_tasks_blocked()
        await run_aio(scene.manager.records.aio_withdraw)
        gate.open()
    assert ({}, [], False) == (scene.discovery.records, scene.published, scene.manager.reconciled)
    assert ["+a", "-a", "-a"] == scene.discovery.log
