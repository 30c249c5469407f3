"""The rings close from the inside, each within its time, and a stop request is never lost."""

from __future__ import annotations

import signal

import pytest
import trio

from trio_sidecar.bridge import Host, run
from trio_sidecar.lifecycle import (
    StopRequest,
    open_acceptor_ring,
    open_handler_ring,
    open_stop_signals,
)


async def test_first_reason_is_kept() -> None:
    """A second stop request changes nothing."""
    stop = StopRequest()
    assert not stop.requested
    assert stop.request("SIGTERM")
    assert not stop.request("SIGINT")
    assert stop.reason == "SIGTERM"
    assert "SIGTERM" in repr(stop)
    await stop.wait()


async def test_drain_waits_for_handlers(autojump_clock: trio.testing.MockClock) -> None:
    """A request that can end within the drain budget is not cut, and the ring closes as soon as it has ended."""
    done = []

    async def handler(seconds: float) -> None:
        await trio.sleep(seconds)
        done.append(seconds)

    start = trio.current_time()
    async with open_handler_ring(10.0) as ring:
        ring.nursery.start_soon(handler, 3.0)
        ring.nursery.start_soon(handler, 9.5)
        assert ring.open == 2
    assert done == [3.0, 9.5]
    assert trio.current_time() - start == pytest.approx(9.5)
    assert not ring.cut


async def test_drain_budget_ends(autojump_clock: trio.testing.MockClock) -> None:
    """A request that outlives the drain budget is cancelled when the budget ends, not later."""
    start = trio.current_time()
    async with open_handler_ring(10.0) as ring:
        ring.nursery.start_soon(trio.sleep_forever)
    assert trio.current_time() - start == pytest.approx(10.0)
    assert ring.cut


async def test_idle_ring_closes_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Without requests the drain takes no time."""
    start = trio.current_time()
    async with open_handler_ring(10.0) as ring:
        pass
    assert trio.current_time() == start
    assert not ring.cut


async def test_error_cancels_handlers_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """A service that fails does not drain."""
    start = trio.current_time()
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError)):
        async with open_handler_ring(10.0) as ring:
            ring.nursery.start_soon(trio.sleep_forever)
            raise ValueError
    assert trio.current_time() == start


async def test_acceptor_withdraws_then_waits_then_ends(autojump_clock: trio.testing.MockClock) -> None:
    """At a stop the acceptor withdraws at once and goes on taking requests for the grace period."""
    stop = StopRequest()
    events: list[tuple[str, float]] = []
    start = trio.current_time()

    def note(what: str) -> None:
        events.append((what, round(trio.current_time() - start, 6)))

    async def withdraw() -> None:
        await trio.lowlevel.checkpoint()
        note("withdrawn")

    async def accept() -> None:
        try:
            await trio.sleep_forever()
        finally:
            note("ended")

    async def request_stop() -> None:
        await trio.sleep(2)
        stop.request("test")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request_stop)
        async with open_acceptor_ring(stop, grace_secs=5, withdraw=withdraw) as acceptor:
            acceptor.start_soon(accept)
    assert events == [("withdrawn", 2.0), ("ended", 7.0)]


async def test_acceptor_ring_ends_with_its_tasks(autojump_clock: trio.testing.MockClock) -> None:
    """Without a stop the ring closes when all that accepts has ended."""
    async with open_acceptor_ring(StopRequest(), grace_secs=5) as acceptor:
        acceptor.start_soon(trio.sleep, 1)
    assert trio.current_time() < 5


async def test_rings_nest(autojump_clock: trio.testing.MockClock) -> None:
    """Stop, withdraw, grace, drain: a request accepted in the grace period gets the whole drain budget."""
    stop = StopRequest()
    done = []
    start = trio.current_time()

    async def handler() -> None:
        await trio.sleep(4)
        done.append(trio.current_time() - start)

    async def accept(handlers: trio.Nursery) -> None:
        while True:
            await trio.sleep(0.9)
            handlers.start_soon(handler)

    async with open_handler_ring(5) as ring, open_acceptor_ring(stop, grace_secs=2) as acceptor:
        acceptor.start_soon(accept, ring.nursery)
        stop.request("test")
    assert done == [pytest.approx(4.9), pytest.approx(5.8)]
    assert not ring.cut


@pytest.mark.rule("R11.7")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_request_a_stop(host: Host, signum: signal.Signals) -> None:
    """The first signal requests the stop, repeated ones do nothing, and the earlier handlers come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def main() -> str:
        async with open_stop_signals() as stop:
            for _ in range(3):
                signal.raise_signal(signum)
            await stop.wait()
            await trio.testing.wait_all_tasks_blocked()
            return stop.reason

    assert run(main, host=host) == signum.name
    assert before == {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


@pytest.mark.rule("FR-050")
async def test_ending_process_is_deaf() -> None:
    """Once a stopping process is past its cleanup, further signals are ignored; without a stop nothing changes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        async with open_stop_signals(process_ends_after=True):
            pass
        assert before == {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        async with open_stop_signals(process_ends_after=True) as stop:
            stop.request("test")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
