"""The watch over an engine, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from support.conversion import convert
from support.samples import minimal_request
from support.traces import RecordedTraces
from trio_sidecar import wire
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.errors import (
    ConnectError,
    ConnectionTimeoutError,
    EngineShutdown,
    IncompatibleEngine,
    RpcError,
    SidecarError,
    StatusCode,
)
from trio_sidecar.lifecycle import StopRequest
from trio_sidecar.recovery import Recovery, RecoverySettings
from trio_sidecar.requests.hang import HangCheck
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, Wait, finish, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

Status = wire.HealthCheckResponseServingStatus
SETTINGS = RecoverySettings(interval_secs=2.0, look_secs=3.0, confirm_secs=0.25, retry_secs=1.0, startup_secs=60.0)
HANG_SECS = 20.0
GONE = ConnectError("no connection to vLLM at 127.0.0.1:1")


def server_info(**changes: Any) -> wire.ServerInfo:
    """An engine's."""
    return wire.ServerInfo(**{"api_version": "vllm", "max_model_len": 8192, "instance_id": "one", **changes})


def model_info(**changes: Any) -> wire.ModelInfo:
    """An engine's."""
    facts = {"model_id": "source", "served_model_name": "served", "supports_token_ids_input": True}
    return wire.ModelInfo(**{**facts, **changes})


@attrs.define(eq=False)
class Moody(FakeEngine):
    """An engine that can go away.

    Attributes:
        mood: Raised instead of any answer to calls and health checks; a Gate holds them up; None is a good mood.
    """

    mood: Exception | Gate | None = None
    looks: int = 0

    async def aio_check_health(self, service: str) -> Status:
        """Serve, or not."""
        self.looks += 1
        await aio_checkpoint()
        if isinstance(self.mood, Gate):
            await self.mood.aio_pass()
        elif self.mood is not None:
            raise self.mood
        return await super().aio_check_health(service)

    def serve(self, **changes: Any) -> None:
        """Be (again) in a good mood, as another instance or another model."""
        model = {name: value for name, value in changes.items() if name in ("model_id", "served_model_name")}
        server = {name: value for name, value in changes.items() if name not in model}
        self.answers = {"GetModelInfo": model_info(**model), "GetServerInfo": server_info(**server)}
        self.health = {"vllm.Control": Status.SERVING, "vllm.Inference": Status.SERVING}
        self.mood = None


@attrs.define(eq=False)
class Book:
    """Whether others can find the worker.

    Attributes:
        paused: Whether an operator has the engine rest.
        events: What happened, with its time.
        failure: Raised when the worker is to be found again.
        replacements: With what it was to be found again: the instance, and whether that was taken for a new one.
    """

    paused: bool = False
    events: list[tuple[str, float]] = attrs.field(factory=list)
    failure: Exception | None = None
    replacements: list[tuple[str, bool]] = attrs.field(factory=list)

    async def aio_withdraw_for_recovery(self) -> None:
        """Note it."""
        await aio_checkpoint()
        self.events.append(("withdrawn", trio.current_time()))

    async def aio_return_from_recovery(self, now: DiscoveredModel, *, replaced: bool) -> None:
        """Note it."""
        await aio_checkpoint()
        self.replacements.append((now.instance_id, replaced))
        if self.failure is not None:
            raise self.failure
        self.events.append(("back", trio.current_time()))


@attrs.define(eq=False)
class World:
    """A worker that is watched.

    Attributes:
        reconnected: Set when a connection has been replaced.
    """

    engine: Moody
    sessions: Sessions
    book: Book
    recovery: Recovery
    stop: StopRequest
    traces: RecordedTraces
    reconnected: trio.Event
    failure: Exception | None = None

    def spans(self) -> list[tuple[str, object]]:
        """Each span's failure, and whether it says that the engine came back."""
        assert ["recovery"] * len(self.traces.seen) == self.traces.names()
        return [(span.failure or "", span.attributes.get("trio_sidecar.recovered")) for span in self.traces.seen]

    def refused(self) -> str:
        """The reason why a request is refused; empty if it is taken."""
        try:
            self.sessions.open(minimal_request(), "r").close()
        except EngineShutdown as error:
            return str(error)
        return ""


@asynccontextmanager
async def world(silence: SilenceLimits | None = None) -> AsyncIterator[World]:
    """A worker in front of an engine that serves."""
    engine = Moody(script=Script(stream=[Send(finish(1, total=1))]))
    engine.serve()
    limits = silence or SilenceLimits()
    sessions = Sessions(responder=ResponseConverter, merge=merge_chunks, silence=limits)
    book, stop, traces = Book(), StopRequest(), RecordedTraces()
    model = DiscoveredModel.from_messages(model_info(), server_info())
    reconnected = trio.Event()

    async def wait_once() -> None:
        if reconnected.is_set():
            await trio.sleep_forever()
        await reconnected.wait()

    recovery = Recovery(
        engine=engine,
        model=model,
        sessions=sessions,
        availability=book,
        stop=stop,
        settings=SETTINGS,
        tracer=traces.tracer,
        reconnected=wait_once,
        hang=HangCheck(aio_generate=engine.aio_generate, sessions=sessions, model="served", silent_secs=HANG_SECS),
    )
    recovery.follow(model)
    found = World(engine, sessions, book, recovery, stop, traces, reconnected)

    def converted(request: Mapping[str, object], _: str) -> Any:
        return convert(dict(request))

    async def watch() -> None:
        try:
            await recovery.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.failure = error

    async with sessions.serving(engine, converted), trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield found
        nursery.cancel_scope.cancel()


@pytest.mark.rule("R15.2")
async def test_a_quiet_healthy_engine_stays_available(aio_loop: object, autojump_clock: object) -> None:
    """Nothing happens for an hour but looks."""
    async with world() as w:
        await trio.sleep(3600)
        assert w.engine.looks > 1000
        assert ([], "", False) == (w.book.events, w.refused(), w.recovery.away)


@pytest.mark.rule("R15.2", "R15.3", "R15.5", "FR-020")
async def test_away_and_back(aio_loop: object, autojump_clock: object) -> None:
    """The worker withdraws, refuses with a reason, and is back by itself when the engine is."""
    async with world() as w:
        await trio.sleep(5)
        w.engine.mood = GONE
        await trio.sleep(3)
        assert ["withdrawn"] == [name for name, _ in w.book.events]
        assert w.recovery.away
        assert "recovering: the engine is away (no connection to vLLM at 127.0.0.1:1)" in w.refused()
        await trio.sleep(20)
        w.engine.serve()
        await trio.sleep(2)
        assert ["withdrawn", "back"] == [name for name, _ in w.book.events]
        assert ("", False, 1) == (w.refused(), w.recovery.away, w.recovery.recoveries)
        w.engine.mood = GONE
        await trio.sleep(3)
        w.engine.serve()
        await trio.sleep(2)
        assert 2 == w.recovery.recoveries
        assert [("", True)] * 2 == w.spans()


@pytest.mark.rule("R15.1")
@pytest.mark.parametrize("service", ["vllm.Control", "vllm.Inference"])
async def test_either_service_counts(aio_loop: object, autojump_clock: object, service: str) -> None:
    """One that is NOT_SERVING is enough, and the reason names it."""
    async with world() as w:
        w.engine.health[service] = Status.NOT_SERVING
        await trio.sleep(3)
        assert f"{service} is NOT_SERVING" in w.refused()
        w.engine.serve()
        await trio.sleep(2)
        assert "" == w.refused()


@pytest.mark.rule("FR-017")
async def test_an_engine_that_does_not_answer_is_away(aio_loop: object, autojump_clock: object) -> None:
    """Health that hangs is no health."""
    async with world() as w:
        w.engine.mood = gate = Gate()
        await trio.sleep(2 + 3 + 0.25 + 3 + 0.1)
        assert "no answer within 3 s" in w.refused()
        gate.open()
        await trio.sleep(2)
        assert "" == w.refused()


@pytest.mark.rule("FR-020")
async def test_one_failed_look_means_nothing(aio_loop: object, autojump_clock: object) -> None:
    """A connection that was just replaced costs no availability."""
    async with world() as w:
        await trio.sleep(1.9)
        w.engine.mood = RpcError(StatusCode.UNAVAILABLE, "lost the connection")
        await trio.sleep(0.2)
        w.engine.serve()
        await trio.sleep(10)
        assert [] == w.book.events


@pytest.mark.rule("R15.6")
async def test_another_lifetime_of_the_same_engine(aio_loop: object, autojump_clock: object) -> None:
    """A replacement that nobody noticed by its health is noticed by its instance: out of service, and back in."""
    async with world() as w:
        w.engine.serve(instance_id="two")
        await trio.sleep(5)
        assert ["withdrawn", "back"] == [name for name, _ in w.book.events]
        await trio.sleep(100)
        assert (2, "") == (len(w.book.events), w.refused())
        assert [("two", True)] == w.book.replacements


@pytest.mark.rule("R15.6")
async def test_an_engine_without_a_lifetime_counts_as_replaced(aio_loop: object, autojump_clock: object) -> None:
    """Where it does not say which lifetime it is in, nothing that was known of its blocks can be trusted."""
    async with world() as w:
        w.engine.serve(instance_id="")
        w.recovery.follow(DiscoveredModel.from_messages(model_info(), server_info(instance_id="")))
        await trio.sleep(10)
        assert [] == w.book.events
        w.engine.mood = GONE
        await trio.sleep(5)
        w.engine.serve(instance_id="")
        await trio.sleep(5)
        assert [("", True)] == w.book.replacements


@pytest.mark.rule("R15.4")
async def test_an_engine_that_goes_again_while_the_worker_returns(aio_loop: object, autojump_clock: object) -> None:
    """The return begins anew, and still knows that the engine was replaced; the worker does not end."""
    async with world() as w:
        w.book.failure = RpcError(StatusCode.UNAVAILABLE, "gone")
        w.engine.serve(instance_id="two")
        await trio.sleep(10)
        assert ([], "withdrawn") == (w.book.events[1:], w.book.events[0][0])
        assert "recovering" in w.refused()
        w.book.failure = None
        await trio.sleep(2)
        assert ["withdrawn", "back"] == [name for name, _ in w.book.events]
        assert {("two", True)} == set(w.book.replacements)
        assert "" == w.refused()
        w.book.failure = RpcError(StatusCode.UNAVAILABLE, "gone for good")
        w.engine.serve(instance_id="three")
        await trio.sleep(SETTINGS.startup_secs + 10)
        assert w.book.failure is w.failure


@pytest.mark.rule("R15.5", "R15.6")
@pytest.mark.parametrize("replaced", [True, False])
async def test_a_connection_that_is_replaced_is_looked_at_at_once(
    aio_loop: object, autojump_clock: object, replaced: bool
) -> None:
    """It may lead to another lifetime of the engine, which is known for sure without a second look."""
    async with world() as w:
        await trio.sleep(0.5)
        looks = w.engine.looks
        if replaced:
            w.engine.serve(instance_id="two")
        w.reconnected.set()
        await trio.sleep(0.01)
        assert looks < w.engine.looks
        assert (["withdrawn", "back"] if replaced else []) == [name for name, _ in w.book.events]


@pytest.mark.rule("R15.7")
@pytest.mark.parametrize("noticed", [True, False])
async def test_another_model_ends_the_worker(aio_loop: object, autojump_clock: object, noticed: bool) -> None:
    """What came back serves something else: the worker ends, and says which field differs; no request gets there."""
    async with world() as w:
        if noticed:
            w.engine.mood = GONE
            await trio.sleep(5)
        w.engine.serve(model_id="other", served_model_name="other", instance_id="two")
        await trio.sleep(5)
        assert isinstance(w.failure, IncompatibleEngine)
        assert "model_id was 'source', is 'other'" in str(w.failure)
        assert ["withdrawn"] == [name for name, _ in w.book.events]
        assert "recovering" in w.refused()


@pytest.mark.rule("R15.16")
async def test_an_engine_that_stays_away(aio_loop: object, autojump_clock: object) -> None:
    """After the start-up budget the worker gives up."""
    async with world() as w:
        w.engine.mood = GONE
        await trio.sleep(2.25 + 60 + 1)
        assert isinstance(w.failure, ConnectError)
        assert "did not become SERVING within 60s" in str(w.failure)
        assert [("ConnectError", None)] == w.spans()


@pytest.mark.rule("R15.15")
async def test_adapters_that_cannot_be_reconciled(aio_loop: object, autojump_clock: object) -> None:
    """They end the worker: a router would send requests for adapters that are not there."""
    async with world() as w:
        w.book.failure = RpcError(StatusCode.INTERNAL, "no list")
        w.engine.serve(instance_id="two")
        await trio.sleep(5)
        assert w.book.failure is w.failure
        assert "recovering" in w.refused()


async def test_nothing_is_given_back_once_the_worker_stops(aio_loop: object, autojump_clock: object) -> None:
    """Dynamo has withdrawn it for good; the engine's return must not undo that."""
    async with world() as w:
        w.engine.mood = GONE
        await trio.sleep(3)
        w.stop.request("SIGTERM")
        w.engine.serve()
        await trio.sleep(10)
        assert ["withdrawn"] == [name for name, _ in w.book.events]
        assert [("", False)] == w.spans()


# -- An engine that says that it serves, and hangs


ANSWER = Script(stream=[Send(tokens(7)), Send(finish(1, total=1))])


def hanging() -> Script:
    """Takes a request, and says nothing."""
    return Script(stream=[Gate()])


async def ask(w: World, at: float = 0.0) -> None:
    """One client, who waits for ever if need be."""
    await trio.sleep(at)
    session = w.sessions.open(minimal_request(), f"r{at}")
    try:
        while await run_aio(session.aio_next) is not None:
            pass
    except SidecarError:
        pass
    finally:
        session.close()


def probes(w: World) -> list[wire.GenerateRequest]:
    return [seen.request for seen in w.engine.requests if seen.request.request_id.startswith("trio-sidecar-probe-")]


@pytest.mark.rule("FR-017")
async def test_an_engine_that_hangs_is_away_until_it_answers(aio_loop: object, autojump_clock: object) -> None:
    """Its health is good, but nobody hears from it: one token is asked for, and the worker leaves and comes back."""
    async with world() as w, trio.open_nursery() as clients:
        w.engine.script = hanging()
        clients.start_soon(ask, w)
        await trio.sleep(HANG_SECS + 3)
        assert (1, [], "") == (len(probes(w)), w.book.events, w.refused())
        (probe,) = probes(w)
        assert ([0], 1, 1, True) == (
            probe.token_ids and probe.token_ids.ids,
            probe.stopping and probe.stopping.max_new_tokens,
            probe.stopping and probe.stopping.min_new_tokens,
            probe.stopping and probe.stopping.ignore_eos,
        )
        await trio.sleep(HANG_SECS)
        assert ["withdrawn"] == [name for name, _ in w.book.events]
        assert "it says that it serves, and has answered nothing for 20 s" in w.refused()
        w.engine.script = ANSWER
        await trio.sleep(HANG_SECS)
        assert (["withdrawn", "back"], "") == ([name for name, _ in w.book.events], w.refused())
        clients.cancel_scope.cancel()


@pytest.mark.rule("FR-017", "FR-020")
async def test_an_engine_that_is_only_slow_stays(aio_loop: object, autojump_clock: object) -> None:
    """It answers the one token in time; while anybody hears from it, nobody asks for one."""
    async with world() as w, trio.open_nursery() as clients:
        w.engine.script = hanging()
        clients.start_soon(ask, w)
        await trio.sleep(1)
        w.engine.script = Script(stream=[Wait(HANG_SECS - 2), Send(finish(1, total=1))])
        for at in range(0, 100, 15):
            clients.start_soon(ask, w, float(at))
        await trio.sleep(100)
        assert [] == probes(w)
        await trio.sleep(50)
        assert len(probes(w)) in {1, 2}
        assert ([], "") == (w.book.events, w.refused())
        clients.cancel_scope.cancel()


async def test_an_idle_engine_is_not_asked(aio_loop: object, autojump_clock: object) -> None:
    """Nobody waits, so nobody is let down: neither before the first request, nor after the last."""
    async with world() as w:
        await trio.sleep(1000)
        w.engine.script = ANSWER
        await ask(w)
        await trio.sleep(1000)
        assert [] == probes(w)


async def test_a_paused_engine_is_not_asked(aio_loop: object, autojump_clock: object) -> None:
    """Requests wait because an operator wants them to."""
    async with world() as w, trio.open_nursery() as clients:
        w.engine.script, w.book.paused = hanging(), True
        clients.start_soon(ask, w)
        await trio.sleep(1000)
        assert ([], []) == (probes(w), w.book.events)
        clients.cancel_scope.cancel()


async def test_a_request_that_runs_into_its_limit_raises_suspicion(aio_loop: object, autojump_clock: object) -> None:
    """Even if that is sooner than the silence would: the engine is asked at once, and is well if it answers."""
    async with world(SilenceLimits(first_response_secs=5)) as w:
        w.engine.script = hanging()
        await ask(w)
        assert [] == probes(w)
        w.engine.script = ANSWER
        await trio.sleep(3)
        assert (1, []) == (len(probes(w)), w.book.events)
        await trio.sleep(1000)
        assert 1 == len(probes(w))


@pytest.mark.parametrize(
    ("refusal", "events"),
    [
        (RpcError(StatusCode.INVALID_ARGUMENT, "no such token"), []),
        (RpcError(StatusCode.UNAVAILABLE, "cut"), []),
    ],
)
async def test_a_probe_that_is_refused_says_nothing(
    aio_loop: object, autojump_clock: object, refusal: RpcError, events: list[str]
) -> None:
    """An engine that refuses does not hang; one that cannot be asked is for the next look to judge."""
    async with world() as w, trio.open_nursery() as clients:
        w.engine.script = hanging()
        clients.start_soon(ask, w)
        await trio.sleep(1)
        w.engine.script = Script(opening=[Fail(refusal)])
        await trio.sleep(3 * HANG_SECS)
        assert events == [name for name, _ in w.book.events]
        assert probes(w)
        clients.cancel_scope.cancel()


@pytest.mark.rule("R15.16")
async def test_an_engine_that_hangs_for_good(aio_loop: object, autojump_clock: object) -> None:
    """After the start-up budget the worker gives up, however healthy the engine says it is."""
    async with world() as w, trio.open_nursery() as clients:
        w.engine.script = hanging()
        clients.start_soon(ask, w)
        await trio.sleep(2 * HANG_SECS + 3 + SETTINGS.startup_secs + 1)
        assert isinstance(w.failure, ConnectionTimeoutError)
        assert "has not answered a request of one token" in str(w.failure)
        clients.cancel_scope.cancel()
