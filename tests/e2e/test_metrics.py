"""The metrics of a real worker, on Dynamo's system server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest

from support.exposition import values
from support.managed import SECONDS, Managed, managed
from trio_sidecar.metrics import WORKER_FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]


def page(service: Managed) -> str:
    """What a scrape gets."""
    answer = httpx2.get(f"http://127.0.0.1:{service.ports[0]}/metrics", timeout=SECONDS, trust_env=False)
    assert httpx2.codes.OK == answer.status_code
    return answer.text


def test_a_scrape_has_dynamos_metrics_and_ours(tmp_path: Path) -> None:
    """Ours follow Dynamo's on one page that Prometheus can read, and count what the worker has done."""
    with managed(tmp_path, flags={}) as service:
        before = values(page(service))
        for _ in range(3):
            assert httpx2.codes.OK == service.complete([5, 6, 7, 8])[0]
        text = page(service)
        found = values(text)
    assert "\ndynamo_" in text
    assert all(f"# TYPE {family.exposed}" in text for family in WORKER_FAMILIES)
    grown = {name: found[name] - before[name] for name in found}
    assert 3 == grown["requests_accepted_total{role=agg}"]
    assert 3 == grown["requests_ended_total{reason=finished,role=agg}"]
    assert (12, 9) == (grown["prompt_tokens_total{role=agg}"], grown["output_tokens_total{role=agg}"])
    assert 3 == grown["time_to_first_token_seconds_count{role=agg}"]
    assert 3 <= grown["inter_token_latency_seconds_count{role=agg}"] <= 6  # tokens may arrive with the first one
    assert 0 < grown["time_to_first_token_seconds_sum{role=agg}"] < SECONDS
    assert 1 == found["engine_state{state=serving}"]
    assert 8 == found["pool_connections{state=idle}"]
    assert 1 <= found["loop_lag_seconds_count"]
