"""A stop request is made once, never lost, and ends start-up whatever that waits for."""

from __future__ import annotations

import gc
import signal
import weakref

import pytest
import trio

from trio_sidecar.bridge import Host, run
from trio_sidecar.lifecycle import StopRequest, open_stop_signals, settle_collector


async def test_first_reason_is_kept() -> None:
    """A second stop request changes nothing."""
    stop = StopRequest()
    assert stop.request("SIGTERM")
    assert not stop.request("SIGINT")
    assert stop.reason == "SIGTERM"
    assert "SIGTERM" in repr(stop)
    await stop.wait()


async def test_stop_cancels_start_up(autojump_clock: trio.testing.MockClock) -> None:
    """A stop ends start-up whatever it waits for; one that came earlier ends it at its first step."""
    stop = StopRequest()

    async def start_up() -> None:
        with stop.cancelling() as scope:
            await trio.Event().wait()
        assert scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_up)
        await trio.sleep(1)
        stop.request("test")
    await start_up()


async def test_spared_scope_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    """What has started up is no longer cancelled by a stop: it drains."""
    stop = StopRequest()
    with stop.cancelling() as scope:
        await trio.sleep(1)
        stop.spare(scope)
        stop.request("test")
        await trio.sleep(1)
    assert not scope.cancelled_caught


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


def test_settled_collector_still_finds_cycles() -> None:
    """A settled collector looks seldom, leaves alone what was alive, and still frees a cycle that comes later."""
    before = gc.get_threshold()
    try:
        settle_collector()
        assert before[0] < gc.get_threshold()[0]
        assert gc.get_freeze_count() > 0
        cycle = Holder()
        cycle.held = cycle
        seen = weakref.ref(cycle)
        del cycle
        assert seen() is not None
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class Holder:
    """Can be part of a cycle, and watched."""

    held: object = None
