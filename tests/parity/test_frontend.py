"""Through Dynamo's front end: every worker before every server that runs a vLLM, and our worker with the engine inside.

All must say the same, which is what the engine says to who asks it directly.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import pytest
import trio

from support import peers, vllm_servers
from support.deviations import deviation
from support.openai import open_client
from support.parity import request as ask
from support.processes import Child, free_port
from support.stack import WorkerKind
from support.vllm_servers import MODEL, read_gauge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from support.openai import OpenAi
    from support.parity import Pair
    from support.vllm_servers import Running

ADAPTER = "poet"
PROMPT = [5, 9, 100, 30]
PLAIN: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
GREEDY: dict[str, Any] = PLAIN | {"max_tokens": 12}
SCHEMA = {"enum": ["gull", "tern"]}
RUNNING = "vllm:num_requests_running"
FREE_SECONDS = 1.0
READY_SECONDS = 30.0
ATTEMPTS = 10
"""Until the engine has been seen at work, so that a zero means something."""
IN_PROCESS = "in-process"
ARRANGEMENTS = [(kind, engine) for engine in ("our-server", "vllm-rs") for kind in WorkerKind]
ARRANGEMENTS += [(WorkerKind.OURS, IN_PROCESS)]


@attrs.frozen(slots=True, kw_only=True)
class Arrangement:
    """A front end, a worker and an engine.

    Attributes:
        metrics_port: Where the engine's own numbers are.
    """

    kind: WorkerKind
    engine: str
    frontend: peers.Frontend
    metrics_port: int

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[OpenAi]:
        """A client, once the front end routes to the worker."""
        async with open_client(self.frontend.url, MODEL, PROMPT) as client:
            limit = trio.current_time() + READY_SECONDS
            while (await client.complete(max_tokens=1)).status != httpx2.codes.OK:
                assert trio.current_time() < limit
                await trio.sleep(0.1)
            yield client


def worker_command(kind: WorkerKind, endpoint: str) -> list[str]:
    """A worker that connects to an engine."""
    start = ["-c", peers.RUST_SIDECAR] if kind is WorkerKind.RUST else ["-m", "trio_sidecar", "worker"]
    return [sys.executable, *start, "--grpc-endpoint", endpoint]


def in_process_command(model: Any, metrics_port: int, options: vllm_servers.Options) -> list[str]:
    """A worker with the engine inside."""
    start = [sys.executable, "-P", str(peers.HERE / "with_metrics_main.py"), str(metrics_port)]
    adapters = ["--lora-modules", f"{ADAPTER}={model.adapter}"]
    return [*start, "worker", "--engine", "vllm", str(options.model), *options.command_line, *adapters]


@contextlib.contextmanager
def arranged(
    kind: WorkerKind, engine: str, argv: Sequence[str], env: dict[str, str], metrics_port: int, directory: Path
) -> Iterator[Arrangement]:
    """Start the worker and a front end; ready once the front end lists the model."""
    discovery = directory / "discovery"
    with contextlib.ExitStack() as cleanup:
        frontend = peers.start_frontend(discovery=discovery, log_dir=directory)
        cleanup.callback(frontend.process.close, seconds=1)
        env = env | peers.dynamo_environment(discovery, DYN_LORA_ENABLED="true")
        worker = Child("worker", argv, env=env, log_dir=directory)
        cleanup.callback(worker.close, seconds=20)
        peers.wait_for_model(frontend, MODEL, [worker], seconds=vllm_servers.START_SECONDS)
        yield Arrangement(kind=kind, engine=engine, frontend=frontend, metrics_port=metrics_port)


@pytest.fixture(scope="module")
def adapter(both: Pair, model: Any) -> Iterator[None]:
    """An adapter in our server, which is the only one of the two that can load it."""
    assert "OK" == both.ours.control("LoadLora", lora_name=ADAPTER, source_path=str(model.adapter))[0]
    yield
    both.ours.control("UnloadLora", lora_name=ADAPTER)


@pytest.fixture(scope="module", params=ARRANGEMENTS, ids=lambda pair: f"{pair[0].value}-{pair[1]}")
def arrangement(
    request: pytest.FixtureRequest,
    adapter: None,
    running: tuple[Running, Running],
    model: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Arrangement]:
    """Each in turn."""
    kind, engine = request.param
    if engine == IN_PROCESS:
        port = free_port()
        options = vllm_servers.Options(
            model=model.path, arguments=["--max-num-seqs=4", "--enable-lora", "--max-loras=2"]
        )
        argv, env = in_process_command(model, port, options), options.environment()
    else:
        server = running[engine == "vllm-rs"]
        argv, env, port = worker_command(kind, server.endpoint), {}, server.metrics_port
    with arranged(kind, engine, argv, env, port, tmp_path_factory.mktemp(engine)) as found:
        yield found


def direct(both: Pair, prompt: Any, count: int, **fields: Any) -> str:
    """What the engine says to who asks it directly."""
    message = ask(prompt, stopping={"max_new_tokens": count, "ignore_eos": True}, **fields)
    return str(both.ours.unary(message).said["text"])


async def test_completion(arrangement: Arrangement, both: Pair) -> None:
    """Text, usage and reason, streamed or not, of token ids."""
    async with arrangement.client() as client:
        whole = await client.complete(**GREEDY)
        streamed = await client.stream_complete(**GREEDY, stream_options={"include_usage": True})
    expected = direct(both, PROMPT, 12)
    assert (expected, "length", (4, 12, 16)) == (whole.text, whole.finish_reason, whole.usage)
    assert (expected, ["length"], [(4, 12, 16)]) == (streamed.text, streamed.finish_reasons, streamed.usages)


async def test_chat(arrangement: Arrangement, both: Pair) -> None:
    """The template's text is what the engine gets."""
    async with arrangement.client() as client:
        whole = await client.chat("hello", **GREEDY)
        streamed = await client.stream_chat("hello", **GREEDY)
    ids = both.ours.unary(ask("<|user|>hello<|end|><|assistant|>", response={"prompt_token_ids": True})).prompt
    assert ids is not None
    told = ids["token_ids"]
    # The tokenizer's start token is the template's to give, and this one does not.
    expected = {direct(both, told[1:], 12), direct(both, told, 12)}
    assert whole.text in expected
    assert whole.text == streamed.text
    assert whole.usage[0] in {len(told), len(told) - 1}


async def test_logprobs(arrangement: Arrangement, both: Pair) -> None:
    """A row per token with our worker; the front end loses those of the Rust sidecar, as with any engine."""
    async with arrangement.client() as client:
        answer = await client.complete(**GREEDY, logprobs=2)
    assert direct(both, PROMPT, 12) == answer.text
    table = answer.choice["logprobs"]
    if arrangement.kind is WorkerKind.RUST:
        assert [] == table["token_logprobs"]
        return
    response = {"output_logprobs": True, "output_candidates": {"top_n": 2}}
    message = ask(PROMPT, stopping={"max_new_tokens": 12, "ignore_eos": True}, response=response)
    expected = both.ours.unary(message).said["logprobs"]
    assert pytest.approx(expected, abs=1e-3) == table["token_logprobs"]


async def test_json_schema(arrangement: Arrangement) -> None:
    """The answer satisfies the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA}}
    async with arrangement.client() as client:
        answer = await client.chat("a bird", temperature=0.0, max_tokens=40, response_format=wanted)
    assert ("stop", True) == (answer.finish_reason, json.loads(answer.text) in SCHEMA["enum"])


async def test_stop_string(arrangement: Arrangement, both: Pair) -> None:
    """The answer ends before it, streamed or not."""
    # Not with ignore_eos, with which the front end drops stop strings.
    options = {"temperature": 0.0, "max_tokens": 24}
    full = direct(both, PROMPT, 24)
    at = next(at for at in range(8, len(full) - 3) if full[at : at + 3].isascii() and full[at : at + 3].isprintable())
    stop = full[at : at + 3]
    async with arrangement.client() as client:
        whole = await client.complete(**options, stop=[stop])
        streamed = await client.stream_complete(**options, stop=[stop])
    expected = full[: full.index(stop)]
    assert (expected, "stop") == (whole.text, whole.finish_reason)
    assert (expected, ["stop"]) == (streamed.text, streamed.finish_reasons)


async def test_adapter(arrangement: Arrangement, both: Pair) -> None:
    """An adapter that the engine holds is a model of its own; vllm-rs 0.32.0 cannot hold one."""
    async with arrangement.client() as client:
        if arrangement.engine == "vllm-rs":
            deviation("lora-load")
            assert 404 == (await client.complete(model=ADAPTER, **GREEDY)).status
            return
        limit = trio.current_time() + READY_SECONDS
        while (answer := await client.complete(model=ADAPTER, **GREEDY)).status != httpx2.codes.OK:
            assert trio.current_time() < limit, answer.body
            await trio.sleep(0.1)
        base = await client.complete(**GREEDY)
    assert direct(both, PROMPT, 12, lora_name=ADAPTER) == answer.text
    assert answer.text != base.text


async def test_a_wrong_request(arrangement: Arrangement) -> None:
    """It is the caller's fault, and does not disturb the next one."""
    async with arrangement.client() as client:
        refused = await client.complete(prompt=[5] * (vllm_servers.CONTEXT_LENGTH + 1), max_tokens=3)
        assert (400, 200) == (refused.status, (await client.complete(max_tokens=3)).status)


async def test_a_client_that_goes_away(arrangement: Arrangement) -> None:
    """The engine's own count of running requests is back at zero within a second."""
    most = 0.0

    def running_requests() -> float:
        return read_gauge(arrangement.metrics_port, RUNNING)

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, await trio.to_thread.run_sync(running_requests))

    async with arrangement.client() as client:
        for _ in range(ATTEMPTS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await client.leave_after("/v1/completions", PLAIN | {"max_tokens": 900}, events=60)
                left = trio.current_time()
                nursery.cancel_scope.cancel()
            while await trio.to_thread.run_sync(running_requests):
                assert trio.current_time() - left < FREE_SECONDS
            if most:
                break
    assert most >= 1
