"""A vLLM in our own process, on both hosts: the engine's gauges follow our scopes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import vllm_server
from support.processes import Child

if TYPE_CHECKING:
    from trio_sidecar.bridge import Host

pytestmark = pytest.mark.timeout(400)

TESTS = Path(vllm_server.__file__).parents[1]


def test_an_engine_in_this_process(host: Host, models: Path, tmp_path: Path) -> None:
    """A cancelled scope frees its request at once, also in vLLM's own gauges; the loop stays alive during the start."""
    env = vllm_server.vllm_environment(models, PYTHONPATH=str(TESTS))
    # Not as a script: its directory holds modules that are called as libraries are.
    argv = [sys.executable, "-m", "support.vllm_inprocess_main", host.value, models / "model"]
    child = Child("inprocess", argv, env=env, log_dir=tmp_path)
    try:
        found = json.loads(child.wait_for_line(r'^\{"ticks_per_second.*$', seconds=vllm_server.START_SECONDS)[0])
        assert 0 == child.wait(seconds=30)
    finally:
        child.close(seconds=1)
    first, second, third = found["texts"]
    assert first
    assert first == second == third
    assert '"gull"' == found["constrained"]
    assert found["long"]
    assert found["ticks_per_second"] > 5
    freed = found["cancelled"]
    assert freed["seen"] > 0
    assert 0 == freed["left"]
    assert freed["seconds"] < 1
