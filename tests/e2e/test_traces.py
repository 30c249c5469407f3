"""One trace from the HTTP request to the engine, through a real Dynamo; the spans arrive at a collector of ours."""

from __future__ import annotations

import contextlib
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import attrs
import httpx2
import pytest
import trio

from support import peers
from support.openai import TIMEOUT_SECONDS
from support.processes import Child, free_port
from support.stack import eventually
from support.traces import REQUEST_PHASES, Collector, SeenSpan, running_collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

MODEL = "mock"
WORKER, ENGINE, DYNAMO = "trio-sidecar-worker", "trio-sidecar-engine", "dynamo"
EXIT_SECONDS = 20
CLIENT_SPAN = "b7ad6b7169203331"
MALFORMED = {"garbage": "garbage", "no-trace": f"00-{'0' * 32}-{CLIENT_SPAN}-01", "long": "00-" + "a" * 4000}


@attrs.frozen(slots=True, kw_only=True)
class Service:
    """A front end, a worker and an engine, each a process of ours; and where their spans arrive."""

    url: str
    collector: Collector
    children: Mapping[str, Child]

    async def ask(self, traceparent: str, **body: object) -> httpx2.Response:
        """One request of a client that traces."""
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True} | body
        async with httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            return await client.post(f"{self.url}/v1/completions", json=body, headers={"traceparent": traceparent})

    def request(self, service: str, trace_id: str) -> SeenSpan | None:
        """What a service did for the request of that trace."""
        found = [span for span in self.collector.named("request", service) if span.trace_id == trace_id]
        assert len(found) <= 1
        return found[0] if found else None

    async def end(self) -> None:
        """End worker, engine and front end, in that order; all cleanly."""
        for name in ("worker", "engine", "frontend"):
            child = self.children[name]
            child.send(signal.SIGTERM)
            code = await trio.to_thread.run_sync(lambda: child.wait(seconds=EXIT_SECONDS), abandon_on_cancel=True)  # noqa: B023
            assert 0 == code, (name, child.log)
            assert "Traceback" not in child.log


@contextlib.contextmanager
def running(
    directory: Path,
    collector: Collector,
    *,
    host: str = "uvloop",
    traced: tuple[str, ...],
    frontend_logs: str = "console",
) -> Iterator[Service]:
    """Start all three; those that are traced have the standard variables, and no others."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    discovery, logs = directory / "discovery", directory / "logs"
    with contextlib.ExitStack() as cleanup:
        children: dict[str, Child] = {}

        def start(name: str, *arguments: str, **own: str) -> Child:
            argv = [sys.executable, "-m", "trio_sidecar", *arguments]
            env = peers.dynamo_environment(discovery, **own, **(variables if name in traced else {}))
            children[name] = Child(name, argv, env=env, log_dir=logs)
            cleanup.callback(children[name].close, seconds=2)
            return children[name]

        port = free_port()
        engine = start(
            "engine", "engine", "mock", "--listen=127.0.0.1:0", f"--served-model-name={MODEL}", "--itl-ms=20"
        )
        start("frontend", "frontend", f"--http-port={port}", TRIO_SIDECAR_LOG_FORMAT=frontend_logs)
        endpoint = engine.wait_for_line(r"listening on (\S+)")[1]
        flags = ("--grpc-endpoint", endpoint, "--withdraw-grace-secs=0.5", f"--host-loop={host}")
        worker = start("worker", "worker", *flags, TRIO_SIDECAR_LOG_FORMAT=frontend_logs)
        frontend = peers.Frontend(children["frontend"], f"http://127.0.0.1:{port}")
        peers.wait_for_model(frontend, MODEL, [worker])
        yield Service(url=frontend.url, collector=collector, children=children)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Where the spans arrive."""
    with running_collector() as made:
        yield made


def way_up(spans: list[SeenSpan], span: SeenSpan) -> list[str]:
    """From a span to the first of its trace that anybody of us made: services and names, and its parent's id."""
    by_id = {each.span_id: each for each in spans}
    way = []
    at: SeenSpan | None = span
    while at is not None:
        way.append(f"{at.service}: {at.name}")
        if at.parent not in by_id:
            return [*way, at.parent]
        at = by_id[at.parent]
    return way


@pytest.mark.parametrize("host", ["uvloop", "trio"])
async def test_one_trace_from_http_to_the_engine(tmp_path: Path, collector: Collector, host: str) -> None:
    """With the standard variables and nothing else: Dynamo's spans, ours, and the engine's are one tree per request."""
    traces = [f"{number:032x}" for number in range(1, 17)]
    with running(tmp_path, collector, host=host, traced=("frontend", "worker", "engine")) as service:

        async def one(trace_id: str) -> None:
            answer = await service.ask(f"00-{trace_id}-{CLIENT_SPAN}-01")
            assert httpx2.codes.OK == answer.status_code, answer.text

        async with trio.open_nursery() as nursery:
            for trace_id in traces:
                nursery.start_soon(one, trace_id)
        await service.end()
    for trace_id in traces:
        request = service.request(ENGINE, trace_id)
        assert request is not None
        way = way_up(collector.seen, request)
        assert [f"{ENGINE}: request", f"{WORKER}: request"] == way[:2]
        assert {f"{DYNAMO}: http-request"} == set(way[-2:-1])
        assert {DYNAMO} == {name.partition(":")[0] for name in way[2:-1]}
        assert CLIENT_SPAN == way[-1]
        for server in (WORKER, ENGINE):
            whole = service.request(server, trace_id)
            assert whole is not None
            phases = {span.name for span in collector.seen if span.parent == whole.span_id and span.service == server}
            assert set(REQUEST_PHASES) == phases
            assert ("finished", 3, 4) == tuple(
                whole.attributes[name]
                for name in ("trio_sidecar.end_reason", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
            )
    assert {WORKER, ENGINE} == {span.service for span in collector.seen if span.name == "drain"}


async def test_a_context_passes_a_worker_that_does_not_trace(tmp_path: Path, collector: Collector) -> None:
    """The engine continues the trace even so; a malformed context costs nobody an answer."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with running(tmp_path, collector, traced=("engine",), frontend_logs="json") as service:
        for malformed in MALFORMED.values():
            answer = await service.ask(malformed)
            assert httpx2.codes.OK == answer.status_code, answer.text
        answer = await service.ask(f"00-{trace_id}-{CLIENT_SPAN}-01")
        assert httpx2.codes.OK == answer.status_code, answer.text
        await eventually(partial(service.request, ENGINE, trace_id), "the engine's span has arrived")
        assert 4 == len(collector.named("request", ENGINE))
        assert {ENGINE} == {span.service for span in collector.seen}
        await service.end()


async def test_a_collector_that_is_away_harms_nobody(tmp_path: Path, collector: Collector) -> None:
    """Requests are answered, and all processes end in time and with 0."""
    away = Collector(url="http://127.0.0.1:9")
    with running(tmp_path, away, traced=("frontend", "worker", "engine")) as service:
        answer = await service.ask(f"00-{1:032x}-{CLIENT_SPAN}-01")
        assert httpx2.codes.OK == answer.status_code, answer.text
        await service.end()
        assert "traces_lost" in service.children["worker"].log
