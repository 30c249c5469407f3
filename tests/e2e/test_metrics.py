"""The metrics and the health of real processes: a worker beside Dynamo, and an engine."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import httpx2
import pytest

from support import peers
from support.exposition import values
from support.managed import SECONDS, Managed, managed, start_engine
from support.processes import free_port
from trio_sidecar.metrics import ENGINE_FAMILIES, WORKER_FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from support.processes import Child

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


def ask(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page; 0 while nobody listens."""
    try:
        answer = httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=SECONDS, trust_env=False)
    except httpx2.TransportError:
        return 0, ""
    return answer.status_code, answer.text


def wait_for_health(child: Child, port: int, status: int, word: str) -> None:
    """Until ``/health`` says so; ``/live`` must be fine all the time."""

    def said() -> bool:
        found = ask(port, "/health")
        assert found[0] == 0 or ask(port, "/live")[0] in {0, httpx2.codes.OK}
        return (status, f"{word}\n") == found

    child.wait_until(said, f"health {word}", seconds=SECONDS)


def test_a_workers_health_is_true_in_every_phase(tmp_path: Path) -> None:
    """Starting, serving, without its engine, with a new one, draining: on a port that is there all the time."""
    port, engine_port = free_port(), free_port()
    worker = peers.start_worker(
        f"127.0.0.1:{engine_port}",
        discovery=tmp_path / "discovery",
        log_dir=tmp_path,
        arguments=[f"--metrics-port={port}", "--grpc-retry-interval-secs=1", "--withdraw-grace-secs=2"],
        name="worker",
    )
    engines = []
    try:
        wait_for_health(worker, port, 503, "starting")
        early = values(ask(port, "/metrics")[1])
        assert (1, 0) == (early["engine_state{state=starting}"], early["requests_accepted_total{role=agg}"])
        for number in range(2):
            engines.append(start_engine({}, log_dir=tmp_path / str(number), port=engine_port))
            wait_for_health(worker, port, 200, "serving")
            if number == 0:
                os.kill(engines[0].process.pid, signal.SIGKILL)
                wait_for_health(worker, port, 503, "away")
        found = values(ask(port, "/metrics")[1])
        assert (1, 0) == (found["engine_recoveries_total"], found["draining"])
        assert found["pool_reconnects_total"] >= 1
        os.kill(worker.pid, signal.SIGTERM)
        wait_for_health(worker, port, 503, "draining")
        assert 1 == values(ask(port, "/metrics")[1])["draining"]
        assert 0 == worker.wait(seconds=SECONDS)
    finally:
        worker.close(seconds=1)
        for engine in engines:
            engine.close()


def test_an_engines_pages(tmp_path: Path) -> None:
    """A mock engine with a metrics port is alive and healthy, and counts the calls of a worker."""
    port = free_port()
    with managed(tmp_path, flags={"--metrics-port": port}) as service:
        assert httpx2.codes.OK == service.complete([5, 6, 7, 8])[0]
        assert (200, 200, 404) == tuple(ask(port, path)[0] for path in ("/live", "/health", "/other"))
        text = ask(port, "/metrics")[1]
    found = values(text)
    assert all(f"# TYPE {family.exposed}" in text for family in ENGINE_FAMILIES)
    assert found["server_calls_total{method=GenerateStream,status=OK}"] >= 1
    assert found["server_output_tokens_total"] >= 3
    assert found["server_connections"] >= 1
