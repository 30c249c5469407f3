"""What the Kubernetes manifests start, started here: the same arguments and variables, probes and end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from support.deployment import DYNAMO_VARIABLES, MANIFESTS, PLANES
from support.pods import SECONDS, running_manifest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(110)]

LONG = 300
"""Tokens of a request that is still running when its pod is told to end; three seconds' worth."""


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_serve_and_drain_within_their_grace_period(tmp_path: Path, path: Path) -> None:
    """Probes succeed, a request is answered, and one that is running when its pod ends is answered in full."""
    with running_manifest(path, tmp_path) as deployment, ThreadPoolExecutor() as pool:

        def begun() -> int:
            return sum(engine.process.log.count("mock_request_started") for engine, _ in deployment.pods)

        before = begun()
        running = pool.submit(deployment.ask, max_tokens=LONG, ignore_eos=True)
        deployment.frontend.process.wait_until(lambda: begun() > before, "the long request runs", seconds=SECONDS)
        if path.stem == "disaggregated":  # until the second engine has it
            running.result(timeout=SECONDS)
        codes = deployment.end_pods()
        answer = running.result(timeout=SECONDS)
    assert [(0, 0)] * len(codes) == codes
    assert httpx2.codes.OK == answer.status_code
    assert LONG == answer.json()["usage"]["completion_tokens"]


def test_dynamo_reads_the_variables() -> None:
    """Each of Dynamo's variables that a file of ours sets is named in Dynamo's binary, and a made-up one is not."""
    from dynamo import _core  # noqa: PLC0415 - the extra of this session

    binary = Path(str(_core.__file__)).read_bytes()
    assert [] == [name for name in DYNAMO_VARIABLES | PLANES if name.encode() not in binary]
    assert b"DYN_NO_SUCH_VARIABLE" not in binary
