"""What callers and operators read of the adapters' lifecycle, to the letter (spec 13.4 to 13.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.lora import lifecycle, load_body, lora, make_adapter
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import RpcError, StatusCode

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from support.lora import Lifecycle

    Loop = asyncio.AbstractEventLoop
    Lines = list[dict[str, Any]]

LIST, LOAD, UNLOAD = "ListLoras", "LoadLora", "UnloadLora"
LOST = RpcError(StatusCode.UNAVAILABLE, "injected")
REFUSED = RpcError(StatusCode.INVALID_ARGUMENT, "injected")


async def update(scene: Lifecycle, name: str, body: Any) -> dict[str, Any]:
    return await run_aio(scene.manager.aio_update, name, body)


async def load(scene: Lifecycle, path: Path) -> dict[str, Any]:
    return await update(scene, "load_lora", load_body("a", path))


async def unload(scene: Lifecycle) -> dict[str, Any]:
    return await update(scene, "unload_lora", {"lora_name": "a"})


async def ready(logs: Lines, *held: wire.LoraAdapter) -> Lifecycle:
    """A reconciled scene; what that logged is forgotten."""
    scene = lifecycle(*held)
    await run_aio(scene.manager.aio_reconcile)
    logs.clear()
    return scene


def without(logs: Lines, *events: str) -> Lines:
    """The other lines."""
    return [line for line in logs if line["event"] not in events]


# -- Answers


@pytest.mark.rule("R13.11")
async def test_messages_of_success(aio_loop: Loop, logs: Lines, tmp_path: Path) -> None:
    """They tell a load from one that had nothing to do."""
    scene = await ready(logs)
    path = make_adapter(tmp_path)
    assert "LoRA adapter 'a' was loaded" == (await load(scene, path))["message"]
    assert "LoRA adapter 'a' is loaded already" == (await load(scene, path))["message"]
    assert "LoRA adapter 'a' was unloaded" == (await unload(scene))["message"]


@pytest.mark.rule("R13.13", "R13.14")
async def test_messages_where_nothing_can_be_managed(aio_loop: Loop, logs: Lines) -> None:
    """They say what it takes."""
    off = await update(lifecycle(enabled=False), "list_loras", {})
    assert (
        "InvalidRequest: LoRA adapters are not enabled: it takes DYN_LORA_ENABLED=true and an engine with room "
        "for adapters"
    ) == off["message"]
    early = await update(lifecycle(attach=False), "list_loras", {})
    assert "the worker's endpoint is not ready; LoRA adapters cannot be managed yet" == early["message"]


async def test_an_unknown_update_is_answered_with_the_name_it_was_for(aio_loop: Loop) -> None:
    """As every other failure is."""
    answer = await update(lifecycle(), "swap_lora", {"lora_name": "a"})
    assert {"status": "error", "message": "unsupported engine update: swap_lora", "lora_name": "a"} == answer


@pytest.mark.rule("R13.8")
async def test_a_fault_of_the_engine_names_its_call(aio_loop: Loop, logs: Lines, tmp_path: Path) -> None:
    """Also where the engine is asked after a load that failed."""
    scene = await ready(logs)
    scene.engine.faults = {LOAD: [wire.LoadLoraResponse()]}
    assert "LoadLora answered without an adapter" in (await load(scene, make_adapter(tmp_path)))["message"]
    scene.engine.faults = {LIST: [wire.ListLorasResponse(adapters=[lora("b", 0)])] * 2}
    listed = await update(scene, "list_loras", {})
    assert "ListLoras returned the adapter 'b' with lora_id 0; ids begin at 1" in listed["message"]


@pytest.mark.rule("R13.7")
async def test_a_clash_of_suffixes_names_both_adapters(aio_loop: Loop, logs: Lines) -> None:
    """Each by its own name."""
    scene = await ready(logs)
    scene.engine.hold(lora("B", 1), lora("b", 2))
    assert (
        "the adapters 'B' and 'b' have the same discovery suffix 'b'"
        in (await update(scene, "list_loras", {}))["message"]
    )


# -- Logs


async def test_a_failed_update_is_logged_with_its_reason(aio_loop: Loop, logs: Lines) -> None:
    """The same sentence that the caller gets."""
    scene = await ready(logs)
    answer = await unload(scene)
    assert "InvalidRequest: LoRA adapter 'a' not found; available are []" == answer["message"]
    assert [
        {"event": "lora_update_failed", "log_level": "warning", "update": "unload_lora", "reason": answer["message"]}
    ] == logs


@pytest.mark.rule("R13.18", "R13.20")
async def test_a_lost_answer_that_had_its_effect_is_logged(aio_loop: Loop, logs: Lines, tmp_path: Path) -> None:
    """The failure that the caller never sees is in the log, of a load and of an unload."""
    scene = await ready(logs)
    scene.engine.late_faults = {LOAD: [LOST], UNLOAD: [LOST]}
    assert "success" == (await load(scene, make_adapter(tmp_path)))["status"]
    assert "success" == (await unload(scene))["status"]
    assert [
        {
            "event": f"lora_{operation}_reconciled",
            "log_level": "info",
            "lora_name": "a",
            "failure": f"{rpc}: injected (Unavailable)",
        }
        for operation, rpc in (("load", LOAD), ("unload", UNLOAD))
    ] == without(logs, "lora_published", "lora_unpublished")


@pytest.mark.rule("R13.18", "R13.19")
@pytest.mark.parametrize("status", [StatusCode.UNAVAILABLE, StatusCode.ALREADY_EXISTS])
async def test_an_engine_that_does_not_say_what_it_holds_is_logged(
    aio_loop: Loop, logs: Lines, tmp_path: Path, status: StatusCode
) -> None:
    """The caller gets the first failure, the log the second one too."""
    scene = await ready(logs)
    scene.engine.faults = {LOAD: [RpcError(status, "first")], LIST: [None, RpcError(StatusCode.INTERNAL, "second")]}
    answer = await load(scene, make_adapter(tmp_path))
    assert "LoadLora: first" in answer["message"]
    assert [
        {
            "event": "lora_state_unknown",
            "log_level": "warning",
            "lora_name": "a",
            "reason": "ListLoras: second (Internal)",
        },
        {"event": "lora_update_failed", "log_level": "warning", "update": "load_lora", "reason": answer["message"]},
    ] == logs


@pytest.mark.rule("R13.18")
async def test_an_engine_that_holds_a_malformed_adapter_is_logged(aio_loop: Loop, logs: Lines, tmp_path: Path) -> None:
    """The log names the call that listed it."""
    scene = await ready(logs)
    scene.engine.faults = {LOAD: [LOST], LIST: [None, wire.ListLorasResponse(adapters=[lora("a", 0)])]}
    await load(scene, make_adapter(tmp_path))
    assert "ListLoras returned the adapter 'a' with lora_id 0; ids begin at 1" in logs[0]["reason"]


@pytest.mark.rule("R13.25")
async def test_what_could_not_be_undone_is_logged(aio_loop: Loop, logs: Lines, tmp_path: Path) -> None:
    """An adapter that stays in the engine, or a record in discovery, is somebody's to clear away."""
    scene = await ready(logs)
    scene.discovery.failures = [ConnectionError("first"), ConnectionError("second")]
    scene.engine.faults[UNLOAD] = [LOST]
    assert "first" in (await load(scene, make_adapter(tmp_path)))["message"]
    assert [
        {"event": "lora_not_undone", "log_level": "warning", "lora_name": "a", "reason": reason}
        for reason in (
            "failed to unpublish the LoRA adapter 'a': second",
            "UnloadLora: injected (Unavailable)",
        )
    ] == without(logs, "lora_update_failed")


@pytest.mark.rule("R13.27")
async def test_a_record_that_could_not_be_restored_is_logged(aio_loop: Loop, logs: Lines) -> None:
    """The adapter is in the engine, and no request can select it."""
    scene = await ready(logs, lora("a", 3))
    scene.engine.faults[UNLOAD] = [REFUSED]
    scene.discovery.failures = [None, ConnectionError("full")]
    await unload(scene)
    assert [
        {
            "event": "lora_not_restored",
            "log_level": "warning",
            "lora_name": "a",
            "reason": "failed to publish the LoRA adapter 'a': full",
        }
    ] == without(logs, "lora_unpublished", "lora_update_failed")


@pytest.mark.rule("R13.27")
async def test_a_record_that_was_restored_is_no_warning(aio_loop: Loop, logs: Lines) -> None:
    """Only the failed update is."""
    scene = await ready(logs, lora("a", 3))
    scene.engine.faults[UNLOAD] = [REFUSED]
    await unload(scene)
    assert ["lora_unpublished", "lora_published", "lora_update_failed"] == [line["event"] for line in logs]


@pytest.mark.rule("R13.28", "R13.31")
async def test_reconciliations_are_logged(aio_loop: Loop, logs: Lines) -> None:
    """One that failed with its reason, one that did not with the number of adapters."""
    scene = lifecycle(lora("a", 1), lora("b", 2))
    scene.engine.faults[LIST] = [LOST]
    await run_aio(scene.manager.aio_reconcile)
    await run_aio(scene.manager.aio_reconcile)
    assert [
        {
            "event": "lora_not_reconciled",
            "log_level": "warning",
            "reason": "ListLoras: injected (Unavailable)",
        },
        {"event": "lora_reconciled", "log_level": "info", "adapters": 2},
    ] == without(logs, "lora_published")


# -- After a recovery


@pytest.mark.rule("R15.4", "R15.15")
async def test_an_engine_that_is_away_takes_all_records_with_it(aio_loop: Loop, logs: Lines) -> None:
    """They come back when the lifecycle has asked the engine again, once; a failure is raised."""
    scene = await ready(logs, lora("a", 3))
    await run_aio(scene.manager.aio_unpublish_all)
    assert ({}, False) == (scene.discovery.records, scene.manager.reconciled)
    scene.engine.faults[LIST] = [LOST]
    with pytest.raises(RpcError, match="injected"):
        await run_aio(scene.manager.aio_reconcile_or_fail)
    await run_aio(scene.manager.aio_reconcile_or_fail)
    await run_aio(scene.manager.aio_reconcile_or_fail)
    assert ([LIST] * 3, ["a"]) == (scene.engine.rpcs, scene.published)


@pytest.mark.rule("R15.15")
@pytest.mark.parametrize(("enabled", "attach"), [(False, True), (True, False)])
async def test_without_a_lifecycle_nothing_is_reconciled(aio_loop: Loop, enabled: bool, attach: bool) -> None:
    """Neither where it is off nor before the endpoint is there."""
    scene = lifecycle(lora("a"), enabled=enabled, attach=attach)
    await run_aio(scene.manager.aio_reconcile_or_fail)
    assert ([], False) == (scene.engine.rpcs, scene.manager.reconciled)
