"""Requests for adapters, while adapters come and go (spec 7.14, 13.8); in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from support.lora import Lifecycle, lifecycle, load_body, lora, make_adapter
from support.samples import model_facts
from trio_sidecar.bridge import run_aio
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import convert_request
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.errors import ErrorKind, RpcError, SidecarError, StatusCode
from trio_sidecar.lora import AdapterGate
from trio_sidecar.requests.cancel import cancel_policy
from trio_sidecar.requests.contract import CancelAtOnce
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Gate, Script, Send, finish, tokens

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from trio_sidecar import wire
    from trio_sidecar.convert.request import ConvertedRequest
    from trio_sidecar.requests.contract import CancelPolicy
    from trio_sidecar.requests.session import Session

LOAD, UNLOAD = "LoadLora", "UnloadLora"
WHOLE = Script(stream=[Send(finish(8))])


def convert(request: Mapping[str, object], request_id: str) -> ConvertedRequest:
    return convert_request(request, request_id=request_id, model=model_facts())


@attrs.define(eq=False)
class Asker:
    """Someone who asks and takes what comes."""

    session: Session
    chunks: list[dict[str, Any]] = attrs.field(factory=list)
    error: SidecarError | None = None

    async def run(self) -> None:
        await run_aio(self._aio_run)

    async def _aio_run(self) -> None:
        try:
            while (chunk := await self.session.aio_next()) is not None:
                self.chunks.append(dict(chunk))
        except SidecarError as error:
            self.error = error

    @property
    def end(self) -> str | None:
        """The finish reason, if it has come."""
        return self.chunks[-1].get("finish_reason") if self.chunks else None


@attrs.define(eq=False)
class World:
    """An engine with adapters, its lifecycle, and sessions in front."""

    scene: Lifecycle
    sessions: Sessions
    nursery: trio.Nursery
    answers: list[dict[str, Any]] = attrs.field(factory=list)

    async def ask(self, name: str | None, *, policy: CancelPolicy = CancelAtOnce()) -> Asker:  # noqa: B008
        """A request for an adapter, or for the base; returns when nothing moves any more."""
        request: dict[str, object] = {"token_ids": [11, 22, 33], "routing": {"lora_name": name}}
        asker = Asker(self.sessions.open(request, "r", policy=policy))
        self.nursery.start_soon(asker.run)
        await settle()
        return asker

    async def update(self, name: str, body: dict[str, Any]) -> None:
        """A call of the lifecycle; likewise."""

        async def run() -> None:
            self.answers.append(await run_aio(self.scene.manager.aio_update, name, body))

        self.nursery.start_soon(run)
        await settle()

    async def unload(self, name: str) -> None:
        await self.update("unload_lora", {"lora_name": name})

    @property
    def submitted(self) -> list[str]:
        """The adapters of the requests that reached the engine."""
        return [received.request.lora_name for received in self.scene.engine.requests]


async def settle() -> None:
    for _ in range(5):
        await wait_all_tasks_blocked()


@asynccontextmanager
async def world(*held: wire.LoraAdapter, script: Script = WHOLE, reconcile: bool = True) -> AsyncIterator[World]:
    scene = lifecycle(*held)
    scene.engine.script = script
    if reconcile:
        await run_aio(scene.manager.aio_reconcile)
    engine = AdapterGate(scene.engine, scene.manager.records, scene.manager.locks)
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks)
    async with trio.open_nursery() as nursery, sessions.serving(engine, convert):
        yield World(scene, sessions, nursery)
    assert 0 == scene.engine.open_streams


@pytest.mark.rule("R7.75", "R7.76")
async def test_a_published_adapter_is_selected_by_its_name(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The engine gets the adapter's name; a request for the base, under any of its names, gets none."""
    async with world(lora("adapter-a")) as here:
        for name in ("adapter-a", None, "model-source", "served-model", "model-alias"):
            assert "length" == (await here.ask(name)).end
        assert ["adapter-a", "", "", "", ""] == here.submitted


@pytest.mark.rule("R7.77", "R13.29", "FR-089")
@pytest.mark.parametrize("reconciled", [True, False])
async def test_what_is_not_published_is_an_unknown_model(
    aio_loop: asyncio.AbstractEventLoop,
    reconciled: bool,
) -> None:
    """An adapter that nobody has, or that has not been published yet, is the caller's error; nothing is submitted."""
    name = "adapter-b" if reconciled else "adapter-a"
    async with world(lora("adapter-a"), reconcile=reconciled) as here:
        asker = await here.ask(name)
        assert asker.error is not None
        assert ErrorKind.INVALID_ARGUMENT == asker.error.kind
        assert f"unknown model '{name}'" in str(asker.error)
        assert "length" == (await here.ask(None)).end
        assert [""] == here.submitted


@pytest.mark.rule("R13.34")
async def test_an_unload_waits_for_requests_on_their_way_and_later_ones_wait_for_it(
    aio_loop: asyncio.AbstractEventLoop,
) -> None:
    """Two requests are pending; the unload waits for both; a third waits for the unload, and then finds nothing."""
    gate = Gate()
    async with world(lora("a"), script=Script(opening=[gate], stream=WHOLE.stream)) as here:
        first, second = await here.ask("a"), await here.ask("a")
        await here.unload("a")
        third = await here.ask("a")
        assert (["a", "a"], []) == (here.submitted, here.answers)
        assert UNLOAD not in here.scene.engine.rpcs
        gate.open()
        await settle()
        assert ["length", "length"] == [first.end, second.end]
        assert "success" == here.answers[0]["status"]
        assert third.error is not None
        assert "unknown model" in str(third.error)
        assert ["a", "a"] == here.submitted


@pytest.mark.rule("R13.34")
async def test_a_request_that_waits_for_an_unload_can_be_cancelled(aio_loop: asyncio.AbstractEventLoop) -> None:
    """It ends with one cancelled terminal and is never submitted; the unload goes on."""
    async with world(lora("a")) as here:
        here.scene.engine.faults[UNLOAD] = [gate := Gate()]
        await here.unload("a")
        waiting = await here.ask("a")
        assert (None, None) == (waiting.end, waiting.error)
        waiting.session.cancel()
        await settle()
        assert "cancelled" == waiting.end
        gate.open()
        await settle()
        assert ([], "success") == (here.submitted, here.answers[0]["status"])


class RefusingGate(Gate):
    """Refuses once it is open."""

    async def aio_pass(self) -> None:
        await super().aio_pass()
        raise RpcError(StatusCode.FAILED_PRECONDITION, "in use")


@pytest.mark.rule("R10.14")
async def test_a_cancelled_decode_waits_for_its_adapter(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Its prefill engine keeps blocks for it, so it is submitted once the adapter is free, and then cancelled."""
    async with world(lora("adapter-a")) as here:
        here.scene.engine.faults[UNLOAD] = [held := RefusingGate()]
        await here.unload("adapter-a")
        asker = await here.ask("adapter-a", policy=cancel_policy(DisaggregationMode.DECODE, lambda: None))
        asker.session.cancel()
        await settle()
        assert ([], None) == (here.submitted, asker.end)
        held.open()
        await settle()
        assert (["adapter-a"], "cancelled") == (here.submitted, asker.end)


@pytest.mark.rule("R13.34")
async def test_a_request_that_waits_for_a_failed_unload_is_served(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The adapter is still there, and published again before the request gets its turn."""
    async with world(lora("a")) as here:
        here.scene.engine.faults[UNLOAD] = [gate := RefusingGate()]
        await here.unload("a")
        waiting = await here.ask("a")
        assert ([], []) == (here.submitted, here.scene.published)
        gate.open()
        await settle()
        assert "in use" in here.answers[0]["message"]
        assert ("length", ["a"]) == (waiting.end, here.submitted)


@pytest.mark.rule("R13.35")
async def test_an_unload_does_not_wait_for_tokens(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Once the engine has accepted a request, its adapter may be unloaded while the tokens still come."""
    gate = Gate()
    script = Script(stream=[Send(tokens(7)), gate, Send(finish(8, total=2))])
    async with world(lora("a"), script=script) as here:
        asker = await here.ask("a")
        assert [7] == asker.chunks[0]["token_ids"]
        await here.unload("a")
        assert "success" == here.answers[0]["status"]
        gate.open()
        await settle()
        assert "length" == asker.end


@pytest.mark.rule("R13.34")
async def test_a_request_waits_for_a_load_of_its_adapter_only(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """While an adapter is being loaded, requests for it wait and are then served; all others are not held up."""
    async with world(lora("b", 5)) as here:
        here.scene.engine.faults[LOAD] = [gate := Gate()]
        await here.update("load_lora", load_body("a", make_adapter(tmp_path)))
        waiting = await here.ask("a")
        assert ["length", "length"] == [(await here.ask(name)).end for name in ("b", None)]
        assert [] == waiting.chunks
        gate.open()
        await settle()
        assert "length" == waiting.end
        assert ["b", "", "a"] == here.submitted


@pytest.mark.rule("R13.34")
async def test_a_refused_request_lets_go_of_its_adapter(aio_loop: asyncio.AbstractEventLoop) -> None:
    """If the engine does not accept the request, the unload need not wait."""
    gate = Gate()
    async with world(lora("a"), script=Script(opening=[gate])) as here:
        asker = await here.ask("a")
        await here.unload("a")
        asker.session.cancel()
        await settle()
        assert ("cancelled", "success") == (asker.end, here.answers[0]["status"])


@pytest.mark.rule("R13.36")
async def test_made_up_names_do_not_pile_up(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Clients choose names; a hundred unknown ones leave no more than the last one's lock."""
    async with world(lora("a")) as here:
        await here.ask("a")
        for number in range(100):
            await here.ask(f"made-up-{number}")
        assert {"a", "made-up-99"} == here.scene.manager.locks.names()
