"""Which adapters are in discovery: refusals, overlaps, and what an operator reads (spec 13.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from support.lora import Discovery
from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import EngineShutdown
from trio_sidecar.lora import Adapter, LoraError, Records
from trio_sidecar.testing.fake_engine import Gate

if TYPE_CHECKING:
    import asyncio

ADAPTER = Adapter(name="a", adapter_id=3, path="/adapters/a")


def attached() -> tuple[Discovery, Records]:
    discovery, records = Discovery(), Records()
    records.attach(discovery)
    return discovery, records


@pytest.mark.rule("R13.14")
async def test_nothing_is_published_before_the_endpoint_is_ready(aio_loop: asyncio.AbstractEventLoop) -> None:
    """There is nowhere to write to yet, and the error says so."""
    with pytest.raises(EngineShutdown) as caught:
        await run_aio(Records().aio_publish, ADAPTER)
    assert "LoRA adapters cannot be published before the endpoint is ready" == str(caught.value)


@pytest.mark.rule("R11.5")
async def test_nothing_is_published_after_a_withdrawal(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The worker leaves, and the error says so."""
    discovery, records = attached()
    await run_aio(records.aio_withdraw)
    with pytest.raises(EngineShutdown) as caught:
        await run_aio(records.aio_publish, ADAPTER)
    assert "the worker is shutting down; no LoRA adapter is published any more" == str(caught.value)
    assert [] == discovery.log


@pytest.mark.rule("R13.23")
async def test_removing_a_record_twice_at_once(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Both ask discovery, since neither knows whether the other will succeed, and both succeed."""
    gate = Gate()

    class Slow(Discovery):
        async def aio_unpublish(self, name: str) -> None:
            await gate.aio_pass()
            await super().aio_unpublish(name)

    discovery, records = Slow(), Records()
    records.attach(discovery)
    await run_aio(records.aio_publish, ADAPTER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_aio, records.aio_unpublish, "a")
        nursery.start_soon(run_aio, records.aio_unpublish, "a")
        await wait_all_tasks_blocked()
        gate.open()
    assert ["+a", "-a", "-a"] == discovery.log
    assert (False, {}) == (await run_aio(records.aio_unpublish, "a"), discovery.records)


async def test_what_is_published_and_removed_is_logged(
    aio_loop: asyncio.AbstractEventLoop, logs: list[dict[str, Any]]
) -> None:
    """With name and id, so that an operator can follow what requests may select."""
    _, records = attached()
    await run_aio(records.aio_publish, ADAPTER)
    await run_aio(records.aio_unpublish, "a")
    assert [
        {"event": "lora_published", "log_level": "info", "lora_name": "a", "lora_id": 3},
        {"event": "lora_unpublished", "log_level": "info", "lora_name": "a"},
    ] == logs


async def test_failures_name_adapter_and_cause(aio_loop: asyncio.AbstractEventLoop, logs: list[dict[str, Any]]) -> None:
    """What discovery said is handed on; records that a shutdown cannot remove are warned about."""
    discovery, records = attached()
    discovery.failures = [ConnectionError("refused"), None, ConnectionError("reset"), ConnectionError("gone")]
    with pytest.raises(LoraError, match=r"failed to publish the LoRA adapter 'a': refused"):
        await run_aio(records.aio_publish, ADAPTER)
    await run_aio(records.aio_publish, ADAPTER)
    with pytest.raises(LoraError, match=r"failed to unpublish the LoRA adapter 'a': reset"):
        await run_aio(records.aio_unpublish, "a")
    logs.clear()
    await run_aio(records.aio_withdraw)
    reason = "failed to unpublish the LoRA adapter 'a': gone"
    assert [
        {"event": "lora_not_unpublished", "log_level": "warning", "lora_name": "a", "reason": reason},
    ] == logs
