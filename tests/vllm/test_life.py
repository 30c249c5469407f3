"""How a server with a real vLLM in it ends, and what it survives."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from support.tiny_model import make_tokenizer
from support.vllm_server import engine_processes, request, vllm_server
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(400)

LONG = wire.StoppingCriteria(ignore_eos=True)
DEATH_SECONDS = 5


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float) -> None:
    """Poll until the condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def status_of(server: VllmServer) -> str:
    """Health in one word; ``gone`` if nobody answers."""
    try:
        return server.health("vllm.Inference").name or ""
    except grpc.RpcError:
        return "gone"


@pytest.mark.rule("FR-018")
def test_an_engine_that_dies_is_replaced_once_and_then_ends_the_server(models: Path, tmp_path: Path) -> None:
    """Streams end with INTERNAL, health says NOT_SERVING, a new engine serves; its death ends the process with 1."""
    arguments = ["--restart-engine=1"]
    with vllm_server(models, make_tokenizer(), tmp_path, arguments=arguments) as server:
        before = server.generate()
        kill_engine_under_load(server)
        assert status_of(server) == "NOT_SERVING"
        assert grpc.StatusCode.INTERNAL == server.refusal(methods.GENERATE, request())
        wait_for(lambda: status_of(server) == "SERVING", "serving again", seconds=120)
        assert before.outputs == server.generate().outputs
        kill_engine_under_load(server)
        assert 1 == server.process.wait(seconds=20)
        last = server.process.log.strip().splitlines()
        assert any("has died after 1 restart" in line for line in last[-5:]), last[-5:]
        assert "Traceback" not in server.process.log


def kill_engine_under_load(server: VllmServer) -> None:
    """Kill the engine's process while a stream runs, and see the stream end."""
    (engine,) = engine_processes(server.process)
    stream = server.stream(request(stopping=LONG))
    next(stream)
    os.kill(engine, signal.SIGSTOP)  # so that the stream cannot end by itself first
    os.kill(engine, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(grpc.RpcError):
        list(stream)
    assert grpc.StatusCode.INTERNAL == stream.code()
    assert time.monotonic() - started < DEATH_SECONDS


@pytest.mark.rule("FR-112")
def test_ctrl_c_drains(models: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches all processes, yet what runs may end first; then nobody is left behind."""
    with vllm_server(models, make_tokenizer(), tmp_path) as server:
        (engine,) = engine_processes(server.process)
        stream = server.stream(request(stopping=LONG))
        next(stream)
        os.killpg(server.process.pid, signal.SIGINT)
        assert wire.FinishInfoFinishReason.LENGTH == list(stream)[-1].outputs.finish_info.finish_reason
        assert 0 == server.process.wait(seconds=30)
        assert is_gone(engine)
        assert "Traceback" not in server.process.log
