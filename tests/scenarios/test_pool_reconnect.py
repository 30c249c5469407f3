"""How a pool finds a peer that went away and came back, in virtual time over attempts that the test decides."""

from __future__ import annotations

import itertools

import pytest
import trio

from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import ConnectError
from trio_sidecar.transport.pool import Pool

OUTAGE_SECS = 60.0


class ScriptedPool(Pool):
    """A pool whose attempts fail until a moment of the test clock."""

    def __init__(self, connections: int, back_at: float) -> None:
        settings = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("engine:50051"), grpc_connections=connections)
        super().__init__(settings, peer="vLLM", bootstrap=False, fast=None)
        self.back_at = back_at
        self.attempts: list[tuple[float, int]] = []
        self.connected: list[tuple[float, int]] = []

    async def _attempt(self, number: int, timeout: float) -> None:  # noqa: ASYNC109 - the pool's signature
        await trio.lowlevel.checkpoint()
        now = round(trio.current_time(), 3)
        self.attempts.append((now, number))
        if now < self.back_at:
            reason = "refused"
            raise ConnectError(reason)
        self.slots[number - 1].lost = trio.Event()
        self.note_peer_is_back()
        self.connected.append((now, number))


async def run_outage(connections: int) -> ScriptedPool:
    """Lose all connections at once; the peer comes back after the outage."""
    start = trio.current_time()
    pool = ScriptedPool(connections, start + OUTAGE_SECS)
    with trio.move_on_after(OUTAGE_SECS + 30):
        async with trio.open_nursery() as nursery:
            for slot in pool.slots:
                slot.lost.set()
                nursery.start_soon(pool.keep, slot)
    return pool


@pytest.mark.rule("FR-027", "FR-030")
async def test_one_connection_wakes_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """The first slot that reaches the returned peer ends the pauses of all others."""
    pool = await run_outage(8)

    first = pool.connected[0][0]
    assert [1, 2, 3, 4, 5, 6, 7, 8] == sorted(number for _, number in pool.connected)
    assert {first} == {moment for moment, _ in pool.connected}


@pytest.mark.rule("FR-028", "FR-029")
async def test_slots_do_not_try_in_step(autojump_clock: trio.testing.MockClock) -> None:
    """Eight slots that were lost together look at different moments, so a return is seen within two seconds."""
    pool = await run_outage(8)

    late = [moment for moment, _ in pool.attempts if pool.back_at - 10 < moment < pool.back_at]
    assert len(late) == len(set(late))
    assert pool.connected[0][0] - pool.back_at < 2.0


@pytest.mark.rule("FR-029")
async def test_a_long_outage_costs_few_attempts(autojump_clock: trio.testing.MockClock) -> None:
    """A slot tries again after a pause that grows to five seconds, and never more often than the retry interval."""
    pool = await run_outage(1)

    moments = [moment for moment, _ in pool.attempts if moment < pool.back_at]
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(moments)]
    assert [1.0, 2.0, 4.0, 5.0] == pauses[:4]
    assert {5.0} == set(pauses[3:])
