"""The programs of docs/tutorials, over real sockets."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from support.serving import LOOPBACK
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.config import ServerSettings, TransportSettings, resolve
from trio_sidecar.deadline import Deadline
from trio_sidecar.discovery import discover
from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.server import serve
from trio_sidecar.testing.fake_engine import FakeEngine, Gate, Script, Send, finish, tokens

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def program(name: str) -> dict[str, Any]:
    """What a tutorial's file defines."""
    return runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name=name)


async def _aio_ask(engine: Any, prompt: list[int], limit: int) -> list[wire.GenerateResponse]:
    request = wire.GenerateRequest(
        token_ids=wire.TokenIds(ids=prompt), stopping=wire.StoppingCriteria(max_new_tokens=limit)
    )
    answers: list[wire.GenerateResponse] = []
    async with engine.aio_generate(request, {}) as stream:
        while taken := await stream.aio_receive():
            answers.extend(taken)
    return answers


async def test_the_own_engine_answers_behind_our_server(aio_loop: object) -> None:
    """A client of the gRPC API finds a model that a worker may register, and gets the prompt's tokens."""
    echo = program("own_engine")["Echo"]()
    async with trio.open_nursery() as nursery:
        settings = ServerSettings(listen=LOOPBACK, drain_secs=0.0)
        (address,) = await nursery.start(partial(serve, echo, settings))
        transport = resolve(TransportSettings, flags={"--grpc-endpoint": str(address)}, environ={})
        async with open_remote(transport, bootstrap=True) as engine:
            model = await discover(engine, Deadline.after(5))
            answers = await run_aio(_aio_ask, engine, [72, 105, 33], 2)
            with pytest.raises(RpcError) as refused:
                await run_aio(_aio_ask, engine, [], 2)
        nursery.cancel_scope.cancel()

    assert (str(MOCK_MODEL_DIR), "echo") == (model.model_id, model.served_model_name)
    outputs = [answer.outputs for answer in answers if answer.outputs is not None]
    assert [72, 105] == [token for output in outputs for token in output.token_ids]
    assert all(output.text for output in outputs)
    assert outputs[-1].finish_info is not None
    assert 2 == outputs[-1].finish_info.num_output_tokens
    assert StatusCode.INVALID_ARGUMENT == refused.value.status


async def start_face(nursery: trio.Nursery, engine: FakeEngine) -> list[trio.SocketListener]:
    """Listen as the tutorial's program does."""
    handle = partial(program("own_face")["handle"], engine)
    listeners: list[trio.SocketListener] = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
    return listeners


async def ask_face(listeners: list[trio.SocketListener], *lines: str) -> list[str]:
    """The face's answers to some lines."""
    async with await trio.open_tcp_stream(*listeners[0].socket.getsockname()) as connection:
        received = b""
        await connection.send_all("".join(f"{line}\n" for line in lines).encode())
        while received.count(b"\n") < len(lines):
            received += await connection.receive_some()
    return received.decode().splitlines()


async def test_the_own_face_answers_each_line(aio_loop: object) -> None:
    """Lines are put to the engine in order, and one that is wrong is told so without an end to the connection."""
    engine = FakeEngine(Script(stream=[Send(tokens(7), tokens(8)), Send(finish(9, total=3))]))
    async with trio.open_nursery() as nursery:
        listeners = await start_face(nursery, engine)
        first, wrong, second = await ask_face(listeners, "11 22", "x", "33")
        nursery.cancel_scope.cancel()

    assert ["7 8 9", "7 8 9"] == [first, second]
    assert wrong.startswith("error: ")
    assert [[11, 22], [33]] == [received.request.token_ids.ids for received in engine.requests]  # type: ignore[union-attr]


async def test_the_own_face_releases_what_it_asked_for(aio_loop: object) -> None:
    """The end of the face's task is the end of the engine's request."""
    asked = trio.Event()

    def script(_: wire.GenerateRequest) -> Script:
        asked.set()
        return Script(stream=[Gate()])

    engine = FakeEngine(script)
    async with trio.open_nursery() as nursery:
        listeners = await start_face(nursery, engine)
        nursery.start_soon(ask_face, listeners, "11 22")
        await asked.wait()
        assert 1 == engine.open_streams
        nursery.cancel_scope.cancel()

    assert engine.requests[0].released
