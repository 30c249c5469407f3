"""A real vLLM through Dynamo's front end: in the worker's own process, and behind our server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import trio

from support import peers
from support.exposition import values
from support.openai import open_client
from support.processes import Child, free_port
from support.vllm_server import MODEL_NAME, START_SECONDS, VLLM_ARGUMENTS, engine_processes, vllm_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(400)

PROMPT = "The harbour"
READY_SECONDS = 30
SCHEMA = {"type": "json_schema", "json_schema": {"name": "bird", "schema": {"enum": ["gull"]}}}


@contextlib.contextmanager
def in_process(models: Path, directory: Path, system_port: int) -> Iterator[tuple[peers.Frontend, Child]]:
    """A worker with the engine in its own process, and a system server."""
    discovery = directory / "discovery"
    frontend = peers.start_frontend(discovery=discovery, log_dir=directory)
    env = peers.dynamo_environment(discovery) | vllm_environment(models) | {"DYN_SYSTEM_PORT": str(system_port)}
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "trio_sidecar",
        "worker",
        "--engine",
        "vllm",
        models / "model",
        *VLLM_ARGUMENTS,
    ]
    worker = Child("worker", argv, env=env, log_dir=directory)
    try:
        peers.wait_for_model(frontend, MODEL_NAME, [worker], seconds=START_SECONDS)
        yield frontend, worker
    finally:
        worker.close(seconds=20)
        frontend.process.close(seconds=2)


@contextlib.contextmanager
def remote(server: VllmServer, directory: Path) -> Iterator[tuple[peers.Frontend, Child]]:
    """A worker that is connected to our server."""
    discovery = directory / "discovery"
    frontend = peers.start_frontend(discovery=discovery, log_dir=directory)
    worker = peers.start_worker(server.endpoint, discovery=discovery, log_dir=directory)
    try:
        peers.wait_for_model(frontend, MODEL_NAME, [worker])
        yield frontend, worker
    finally:
        worker.close(seconds=20)
        frontend.process.close(seconds=2)


async def answers(frontend: peers.Frontend, prompt: list[int]) -> dict[str, Any]:
    """What clients get; the same from every arrangement."""
    plain: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with open_client(frontend.url, MODEL_NAME, prompt) as client:
        limit = trio.current_time() + READY_SECONDS
        while (await client.complete(max_tokens=1)).status != httpx2.codes.OK:
            assert trio.current_time() < limit
            await trio.sleep(0.1)
        chat = await client.chat(**plain, logprobs=True, top_logprobs=2)
        whole = await client.complete(**plain)
        streamed = await client.stream_complete(**plain)
        choice = await client.chat(max_tokens=20, temperature=0.0, response_format=SCHEMA)
        stop = whole.text[-3:-1]  # of what it says anyway, so that the string is met
        assert stop.isascii()
        # Without ignore_eos, which makes the front end drop stop strings as well.
        stopped = await client.complete(max_tokens=8, temperature=0.0, stop=[stop])
        refused = await client.complete(**plain, n=2)
        left = await client.leave_after("/v1/completions", plain | {"max_tokens": 200}, events=2)
    assert whole.text == streamed.text
    assert whole.text[: whole.text.index(stop)] == stopped.text
    assert left["choices"]
    return {
        "chat": chat.text,
        "logprobs": len(chat.choice["logprobs"]["content"]),
        "text": whole.text,
        "usage": whole.usage,
        "finish": whole.finish_reason,
        "schema": json.loads(choice.text),
        "stopped": stopped.finish_reason,
        "refused": refused.status,
    }


async def test_in_process_and_remote_say_the_same(
    server: VllmServer, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chat, completions, logprobs, JSON schema, stop strings, usage and refusals; then metrics and the worker's ends.

    The worker with the engine in its own process fails when the engine is killed.
    """
    prompt = server.tokenizer.encode(PROMPT).ids
    with remote(server, tmp_path_factory.mktemp("remote")) as (frontend, worker):
        expected = await answers(frontend, prompt)
        worker.send(signal.SIGTERM)
        assert 0 == worker.wait(seconds=20)
    assert (8, "gull", "length", "stop", 400) == (
        expected["logprobs"],
        expected["schema"],
        expected["finish"],
        expected["stopped"],
        expected["refused"],
    )
    assert (len(prompt), 8, len(prompt) + 8) == expected["usage"]
    port = free_port()
    with in_process(models, tmp_path_factory.mktemp("in-process"), port) as (frontend, worker):
        assert expected == await answers(frontend, prompt)
        async with httpx2.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        assert values(page)["engine_state{state=serving}"]
        assert any(name.startswith("generation_tokens_total") for name in values(page, "vllm:"))
        (engine,) = engine_processes(worker)
        os.kill(engine, signal.SIGKILL)
        assert 1 == worker.wait(seconds=20)
        assert "has died" in worker.log
