"""An engine whose server lives and whose tokens do not come: its worker leaves until an engine answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from support.managed import SECONDS, managed, start_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

NEVER = {"--ttft-ms": 10_000_000}


@pytest.mark.rule("FR-017")
def test_an_engine_that_hangs_behind_good_health(tmp_path: Path) -> None:
    """The worker asks for one token, gets none, and withdraws; health stays good; the next engine brings it back."""
    with managed(tmp_path, flags={}, arguments=["--hang-check-secs", "1"]) as service:
        (worker,), (engine,), front = service.workers, service.engines, service.frontend.process
        engine.process.close(seconds=0)
        front.wait_until(lambda: service.instances() == 0, "the worker has withdrawn", seconds=SECONDS)
        hung = start_engine(NEVER, log_dir=tmp_path / "hung", port=engine.port)
        try:
            front.wait_until(lambda: service.instances() == 1, "the worker is back", seconds=SECONDS)
            client = threading.Thread(target=service.complete, args=([5],))
            client.start()
            worker.wait_for_line("engine_probed")
            front.wait_until(lambda: service.instances() == 0, "the worker has withdrawn", seconds=SECONDS)
            worker.wait_for_line("it says that it serves, and has answered nothing for 1 s")
        finally:
            hung.process.close(seconds=0)
        client.join(SECONDS)
        well = start_engine({}, log_dir=tmp_path / "well", port=engine.port)
        try:
            front.wait_until(lambda: service.instances() == 1, "the worker is back", seconds=SECONDS)
            front.wait_until(lambda: service.complete([5])[0] == 200, "an answer", seconds=SECONDS)
        finally:
            well.close()
