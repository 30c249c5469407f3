"""The worker's metrics are what its parts have counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import trio_sidecar
from support.exposition import values
from support.worker_metrics import MODEL, FakeRecovery, new_metrics
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.remote import RemoteEngine
from trio_sidecar.metrics import WORKER_FAMILIES
from trio_sidecar.testing.fake_engine import FakeEngine
from trio_sidecar.transport.pool import Pool

if TYPE_CHECKING:
    from trio_sidecar.worker.metrics import WorkerMetrics


def states(metrics: WorkerMetrics) -> set[str]:
    """The states that the engine is in."""
    found = values(metrics.text())
    return {name for name, value in found.items() if name.startswith("engine_state") and value}


def test_before_the_engine() -> None:
    """Every family is there, for this worker's role only, and the engine is still starting."""
    metrics = new_metrics()
    found = values(metrics.text())
    assert 1 == found[f"build_info{{version={trio_sidecar.__version__}}}"]
    assert {"engine_state{state=starting}"} == states(metrics)
    assert {"role=decode"} == {
        part for name in found for part in name.strip("}").split("{")[-1].split(",") if "role" in part
    }
    assert 0 == found["requests_ended_total{reason=error,role=decode}"]
    assert 0 == found["pool_connections{state=down}"]
    assert {family.key for family in WORKER_FAMILIES} >= set(metrics.read())


async def test_the_engines_states() -> None:
    """Serving, away, serving again, stopped; and which life of it that is."""
    metrics, recovery = new_metrics(), FakeRecovery()
    metrics.attach(FakeEngine(), MODEL, recovery)  # type: ignore[arg-type]
    assert {"engine_state{state=serving}"} == states(metrics)
    found = values(metrics.text())
    assert 1 == found["engine_info{engine_version=0.32.0,instance_id=life-1,model=served-model}"]
    assert 2 == found["engine_recoveries_total"]
    recovery.away = True
    assert {"engine_state{state=away}"} == states(metrics)
    recovery.away, recovery.instance_id = False, "life-2"
    assert 1 == values(metrics.text())["engine_info{engine_version=0.32.0,instance_id=life-2,model=served-model}"]
    async with metrics.sessions.serving(FakeEngine(), lambda *_: pytest.fail("nobody asks")):
        assert {"engine_state{state=serving}"} == states(metrics)
    assert {"engine_state{state=stopped}"} == states(metrics)


def test_draining() -> None:
    """From the moment that a stop is asked for."""
    metrics = new_metrics()
    assert 0 == values(metrics.text())["draining"]
    metrics.stop.request("SIGTERM")
    assert 1 == values(metrics.text())["draining"]


def test_counts_of_requests() -> None:
    """Each number of the meter is in its own family."""
    metrics = new_metrics()
    meter = metrics.sessions.meter
    meter.accepted, meter.prompt_tokens, meter.output_tokens, meter.chunks = 1, 2, 3, 4
    meter.ended["timeout"], meter.refused["overloaded"] = 5, 6
    for number, histogram in enumerate((meter.first_response, meter.first_token, meter.inter_token, meter.duration)):
        histogram.observe(number + 1.0)
    metrics.lag.observe(0.75)
    expected = {
        "requests_accepted_total{role=decode}": 1,
        "prompt_tokens_total{role=decode}": 2,
        "output_tokens_total{role=decode}": 3,
        "chunks_total{role=decode}": 4,
        "requests_ended_total{reason=timeout,role=decode}": 5,
        "requests_refused_total{reason=overloaded,role=decode}": 6,
        "first_response_seconds_sum{role=decode}": 1,
        "time_to_first_token_seconds_sum{role=decode}": 2,
        "inter_token_latency_seconds_sum{role=decode}": 3,
        "request_duration_seconds_sum{role=decode}": 4,
        "loop_lag_seconds_sum": 0.75,
        "requests_in_flight{role=decode}": 0,
    }
    found = values(metrics.text())
    assert expected == {name: found[name] for name in expected}


def test_the_pool() -> None:
    """States, streams by place, waiters, waits, resets; a place without a connection is down and takes no stream."""
    settings = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("engine:1"), grpc_connections=2)
    pool = Pool(settings, peer="vLLM", bootstrap=False, fast=None)
    pool.meter.note_reset(8)
    pool.meter.wait.observe(0.5)
    pool.slots[0].open_streams = 3
    metrics = new_metrics()
    metrics.attach(RemoteEngine(pool), MODEL, FakeRecovery())  # type: ignore[arg-type]
    found = values(metrics.text())
    expected = {
        "pool_connections{state=active}": 0,
        "pool_connections{state=idle}": 0,
        "pool_connections{state=draining}": 0,
        "pool_connections{state=down}": 2,
        "pool_streams{connection=1}": 3,
        "pool_streams{connection=2}": 0,
        "pool_stream_limit{connection=1}": 0,
        "pool_waiters": 0,
        "pool_wait_seconds_sum": 0.5,
        "pool_reconnects_total": 0,
        "pool_reconnect_failures_total": 0,
        "pool_stream_resets_total{code=CANCEL}": 1,
        "pool_stream_resets_total{code=other}": 0,
    }
    assert expected == {name: found[name] for name in expected}


def test_the_state_of_the_worker() -> None:
    """That of its engine, until a stop is asked for: from then on it drains, whatever the engine does."""
    metrics, recovery = new_metrics(), FakeRecovery()
    seen = [metrics.state]
    metrics.attach(FakeEngine(), MODEL, recovery)  # type: ignore[arg-type]
    for recovery.away in (False, True, False):
        seen.append(metrics.state)
    metrics.stop.request("SIGTERM")
    seen.append(metrics.state)
    assert ["starting", "serving", "away", "serving", "draining"] == seen
    assert {"engine_state{state=serving}"} == states(metrics)
