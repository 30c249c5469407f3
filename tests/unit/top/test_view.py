"""What is shown of a worker and of an engine, from their real metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.lifecycle import StopRequest
from trio_sidecar.metrics import ENGINE_FAMILIES, WORKER_FAMILIES, CallMeter, FamilyCollector, exposition
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.top import view as view_module
from trio_sidecar.top.scrape import Sample, parse
from trio_sidecar.top.view import HISTORY, Course, Latency, Slot, View, view
from trio_sidecar.worker.metrics import WorkerMetrics

MODEL: Any = SimpleNamespace(served_model_name="served-model", engine_version="0.32.0")
RECOVERY: Any = SimpleNamespace(away=False, recoveries=3, instance_id="life-2")


def new_worker() -> WorkerMetrics:
    """A worker whose engine has started."""
    metrics = WorkerMetrics(
        sessions=Sessions(responder=ResponseConverter, merge=merge_chunks), stop=StopRequest(), role="agg"
    )
    metrics.attach(object(), MODEL, RECOVERY)  # type: ignore[arg-type]
    return metrics


def sample(metrics: WorkerMetrics, at: float) -> Sample:
    """What it says at a moment."""
    return parse(metrics.text(), at)


def test_a_worker() -> None:
    """Rates are those of the interval, times those of its observations, all else what is now."""
    metrics = new_worker()
    meter = metrics.sessions.meter
    meter.output_tokens = 1000
    before = sample(metrics, 10.0)
    meter.output_tokens, meter.prompt_tokens, meter.chunks = 1500, 60, 250
    meter.ended["finished"], meter.ended["error"] = 4, 1
    for _ in range(10):
        meter.first_token.observe(0.03)
        meter.inter_token.observe(0.004)
        metrics.lag.observe(0.0)
    found = view(before, sample(metrics, 12.0))
    assert ("served-model (0.32.0)", "serving", "life-2", 3) == (
        found.model,
        found.engine,
        found.engine_id,
        found.recoveries,
    )
    assert (250, 30, 0.5) == (found.tokens_out, found.tokens_in, found.chunks_per_token)
    assert {"finished": 2, "error": 0.5} == found.ended
    assert (False, 0) == (found.draining, found.in_flight)
    assert found.ttft.p50 is not None
    assert 0.025 < found.ttft.p50 < 0.05
    assert found.itl.p99 is not None
    assert 0.0025 < found.itl.p99 <= 0.005
    assert found.loop_lag.p50 is not None


def test_the_first_sample_has_no_rates() -> None:
    """What is now is shown; what needs an earlier sample is not."""
    found = view(None, sample(new_worker(), 1.0))
    assert (None, None, None, Latency()) == (found.tokens_out, found.tokens_in, found.chunks_per_token, found.ttft)
    assert ("serving", {}) == (found.engine, found.ended)


def test_the_pool() -> None:
    """Each connection with its streams, and whether it is down."""
    reading: dict[str, Any] = {
        "pool_streams": {("1",): 3, ("2",): 0},
        "pool_stream_limit": {("1",): 99, ("2",): 0},
        "pool_waiters": 2,
        "pool_reconnects": 5,
    }
    text = exposition(FamilyCollector(WORKER_FAMILIES, lambda: reading, {"role": "agg"}))
    found = view(None, parse(text, 0.0))
    assert (Slot("1", 3, 99), Slot("2", 0, 0)) == found.slots
    assert (2, 5) == (found.waiting, found.reconnects)


def test_an_engine() -> None:
    """Its calls stand for requests; it has no pool and no engine state."""
    meter = CallMeter()

    def at(moment: float) -> Sample:
        reading: dict[str, Any] = {
            "server_calls": meter.ended.copy(),
            "server_calls_in_flight": 7,
            "server_output_tokens": meter.output_tokens,
            "server_draining": 1,
        }
        return parse(exposition(FamilyCollector(ENGINE_FAMILIES, lambda: reading)), moment)

    meter.note_end("GenerateStream", "OK", 0.1)
    before = at(0.0)
    meter.output_tokens = 50
    for _ in range(4):
        meter.note_end("GenerateStream", "OK", 0.1)
    found = view(before, at(2.0))
    assert (7, 25, {"OK": 2}, True, "", ()) == (
        found.in_flight,
        found.tokens_out,
        found.ended,
        found.draining,
        found.engine,
        found.slots,
    )


def test_something_else_entirely() -> None:
    """A page of other metrics gives a view in which nothing is known."""
    assert View() == view(None, parse("# TYPE up gauge\nup 1\n", 0.0))


@pytest.mark.parametrize("families", [WORKER_FAMILIES, ENGINE_FAMILIES])
def test_names_are_those_of_the_table(families: Any) -> None:
    """Every name that is asked for is one that is exposed."""
    known = {family.exposed for family in (*WORKER_FAMILIES, *ENGINE_FAMILIES)}
    asked: set[str] = set()

    class Spy(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name.removesuffix("_bucket"))
            return super().get(name, default)

    page = parse(exposition(FamilyCollector(families, dict, {"role": "agg"})), 1.0)
    view_module.view(Sample(at=0.0, series=Spy(page.series)), Sample(at=1.0, series=Spy(page.series)))
    assert asked <= known
    assert len(asked) >= 5


def test_courses_have_an_end() -> None:
    """A minute is kept; a moment without an answer is a gap."""
    course = Course()
    course.add(None)
    for number in range(HISTORY):
        course.add(View(tokens_out=number, ttft=Latency(p50=0.5)))
    assert list(range(HISTORY)) == list(course.tokens)
    course.add(None)
    assert [HISTORY - 1, None] == list(course.tokens)[-2:]
    assert [0.5, None] == list(course.ttft)[-2:]
    assert [None, None] == list(course.itl)[-2:]
