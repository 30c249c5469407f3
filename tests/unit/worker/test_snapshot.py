"""Snapshots of what a worker holds."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest
import structlog.testing
import trio
import trio.testing

from trio_sidecar.bridge import Host, run
from trio_sidecar.requests.sessions import Sessions, SessionsStatistics
from trio_sidecar.worker.snapshot import log_snapshots


class FakeSessions:
    """Stands for the sessions of a worker."""

    def statistics(self) -> SessionsStatistics:
        """Three open requests."""
        return SessionsStatistics(open=3, peak_open=5, refused=0, ended={"stop": 7})


async def take_two() -> list[Any]:
    """Ask for two snapshots, for the second with one more Trio task."""
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_snapshots, cast("Sessions", FakeSessions()))
            for count in (1, 2):
                await trio.testing.wait_all_tasks_blocked(0.01)
                signal.raise_signal(signal.SIGUSR1)
                with trio.fail_after(5):
                    while len(logs) < count:  # noqa: ASYNC110 - the log has no event to wait for
                        await trio.sleep(0.01)
                nursery.start_soon(trio.sleep_forever)
            nursery.cancel_scope.cancel()
    return logs


@pytest.mark.parametrize("host", list(Host))
def test_snapshot_is_logged_at_a_signal(host: Host) -> None:
    """Each SIGUSR1 logs requests, tasks and open files; afterwards the signal has its old effect."""
    before = signal.getsignal(signal.SIGUSR1)
    first, second = run(take_two, host=host)
    assert before == signal.getsignal(signal.SIGUSR1)
    assert "worker_snapshot" == first["event"]
    assert {"open": 3, "peak_open": 5, "refused": 0, "ended": {"stop": 7}} == first["requests"]
    assert first["trio_tasks"] + 1 == second["trio_tasks"]
    assert first["aio_tasks"] == second["aio_tasks"]
    assert first["open_files"] > 3
    assert first["objects"] > 100
