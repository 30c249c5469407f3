"""The engine ring at the edges of the worker's life; its usual course is tested with the whole worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.lifecycle import StopRequest
from trio_sidecar.worker.life import WorkerLife

if TYPE_CHECKING:
    from trio_sidecar.engines.contract import Engine


async def test_a_start_after_the_worker_has_ended(aio_loop: object) -> None:
    """A start that comes too late fails, and the cleanup after it does not wait for what never began."""

    async def start_up(engine: Engine) -> Any:
        await trio.lowlevel.checkpoint()
        raise AssertionError

    async with trio.open_nursery() as nursery:
        pass
    unused: Any = None
    life = WorkerLife(
        nursery=nursery, stop=StopRequest(), sessions=unused, open_engine=unused, start_up=start_up, drain_secs=1.0
    )
    with pytest.raises(RuntimeError, match="closed"):
        await run_aio(life.aio_start)
    with trio.fail_after(1):
        await run_aio(life.aio_stop)
