"""The remote engine against a scripted peer and against real gRPC servers."""

from __future__ import annotations

import socket
import time
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import grpc
import pytest
import trio

from support.mock_engine import token_settings
from trio_sidecar import wire
from trio_sidecar.bridge import Host, run, run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.engines.contract import RANK_METADATA_KEY, Engine
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.engines.remote import RemoteEngine, open_remote
from trio_sidecar.errors import ErrorKind, ProtocolError, RpcError, StatusCode
from trio_sidecar.testing.fake_engine import finish, tokens
from trio_sidecar.testing.peer import PeerStream, open_peer
from trio_sidecar.transport.client import Client
from trio_sidecar.transport.fastconnection import FastConnection
from trio_sidecar.wire import codec
from trio_sidecar.wire.codec import EncodeError, decode, encode
from trio_sidecar.wire.methods import GENERATE_STREAM, GET_MODEL_INFO, GET_SERVER_INFO, HEALTH_CHECK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVING = wire.HealthCheckResponseServingStatus.SERVING


def settings(port: int, connections: int = 1) -> TransportSettings:
    return TransportSettings(
        grpc_endpoint=GrpcEndpoint.parse(f"127.0.0.1:{port}"),
        grpc_connections=connections,
        grpc_startup_deadline_secs=5.0,
    )


async def aio_ids(engine: Engine, metadata: dict[str, str] | None = None) -> list[int]:
    """All token ids of one generation."""
    ids: list[int] = []
    async with engine.aio_generate(wire.GenerateRequest(request_id="r"), metadata or {}) as stream:
        while batch := await stream.aio_receive():
            for response in batch:
                assert response.outputs is not None
                ids += response.outputs.token_ids
    return ids


async def aio_error(engine: Engine) -> Exception:
    """The error of one generation."""
    try:
        await aio_ids(engine)
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return error
    pytest.fail("no error")


# -- Against a scripted peer


async def test_one_generation(aio_loop: object) -> None:
    """Request, rank metadata and answers pass unchanged."""

    async def script(stream: PeerStream) -> None:
        assert "/vllm.Inference/GenerateStream" == stream.path
        request = decode(wire.GenerateRequest, await stream.receive_request())
        assert "r" == request.request_id
        await stream.send_headers()
        await stream.send_message(encode(tokens(1, 2)), encode(finish(3, total=3)))
        await stream.send_trailers()

    async with open_peer(script) as peer, open_remote(settings(peer.port)) as engine:
        assert [1, 2, 3] == await run_aio(aio_ids, engine, {RANK_METADATA_KEY: "4"})
        assert "4" == peer.streams[0].headers[RANK_METADATA_KEY]
        assert [] == peer.faults


@pytest.mark.rule("R4.1", "R4.2", "R4.4")
@pytest.mark.parametrize("status", [status for status in StatusCode if status is not StatusCode.OK])
async def test_refusals_name_the_call(aio_loop: object, status: StatusCode) -> None:
    """Every status becomes an error whose text names call, message and status, and whose kind is the table's."""

    async def script(stream: PeerStream) -> None:
        await stream.send_trailers_only(int(status), "failure")

    async with open_peer(script) as peer, open_remote(settings(peer.port)) as engine:
        error = await run_aio(aio_error, engine)
        assert isinstance(error, RpcError)
        assert f"GenerateStream: failure ({status.label})" == str(error)
        assert status.kind is error.kind


async def test_bytes_that_are_no_message(aio_loop: object) -> None:
    """A peer that sends something else than the declared message broke the contract; its stream is reset."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"\x0a\xff\xff\xff")
        await trio.sleep_forever()

    async with open_peer(script) as peer, open_remote(settings(peer.port)) as engine:
        error = await run_aio(aio_error, engine)
        assert isinstance(error, ProtocolError)
        assert ErrorKind.UNKNOWN is error.kind
        assert "GenerateStream" in str(error)
        with trio.fail_after(1):
            await peer.streams[0].gone.wait()
        assert [8] == peer.reset_codes


async def test_a_request_that_cannot_be_encoded(aio_loop: object) -> None:
    """A value that the wire cannot carry is refused before anything is sent, by name."""
    request = wire.GenerateRequest(priority=2**40)

    async def aio_main(engine: RemoteEngine) -> None:
        async with engine.aio_generate(request, {}):
            pytest.fail("encoded")

    async with open_peer(script_nothing) as peer, open_remote(settings(peer.port)) as engine:
        with pytest.raises(EncodeError, match="priority"):
            await run_aio(aio_main, engine)
        assert [] == peer.streams


async def test_the_first_request_compiles_nothing(aio_loop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec of the hot messages is ready when an engine is open, remote or mock."""
    hot = {wire.GenerateRequest, wire.GenerateResponse}
    async with open_peer(script_nothing) as peer:
        for engine in (open_remote(settings(peer.port)), open_mock(token_settings())):
            fresh = type(codec._functions)()
            monkeypatch.setattr(codec, "_functions", fresh)
            async with engine:
                assert hot <= fresh.encoders.keys()
                assert hot <= fresh.decoders.keys()


async def script_nothing(stream: PeerStream) -> None:
    await trio.sleep_forever()


@pytest.mark.rule("R3.12")
async def test_a_request_over_the_limit_is_not_sent(aio_loop: object) -> None:
    """A request that is too large fails here, with the limit in the message."""

    async def aio_main(engine: RemoteEngine) -> None:
        async with engine.aio_generate(wire.GenerateRequest(request_id="x" * 200), {}):
            pytest.fail("sent")

    async with open_peer(script_nothing) as peer:
        async with open_remote(attrs.evolve(settings(peer.port), max_message_bytes=100)) as engine:
            with pytest.raises(RpcError, match="limit of 100") as caught:
                await run_aio(aio_main, engine)
        assert StatusCode.RESOURCE_EXHAUSTED is caught.value.status
        assert [] == peer.streams


@pytest.mark.parametrize("count", [0, 2])
async def test_a_unary_call_has_one_answer(aio_loop: object, count: int) -> None:
    """No message, or two, where one is due is a fault of the peer."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(*[b""] * count)
        await stream.send_trailers()

    async def aio_main(engine: RemoteEngine) -> None:
        await engine.aio_call(GET_MODEL_INFO, wire.GetModelInfoRequest())

    async with open_peer(script) as peer, open_remote(settings(peer.port)) as engine:
        with pytest.raises(ProtocolError, match=f"GetModelInfo: {count} messages"):
            await run_aio(aio_main, engine)


async def test_a_unary_call_may_have_a_time_limit(aio_loop: object) -> None:
    """A call that overruns its limit fails with DEADLINE_EXCEEDED, tells the peer, and frees the connection."""

    async def aio_main(engine: RemoteEngine) -> None:
        await Client(engine.pool).aio_unary(HEALTH_CHECK, wire.HealthCheckRequest(), timeout_secs=0.1)

    async with open_peer(script_nothing) as peer, open_remote(settings(peer.port)) as engine:
        with pytest.raises(RpcError, match=r"Health\.Check: no answer within 100ms \(DeadlineExceeded\)") as caught:
            await run_aio(aio_main, engine)
        assert ErrorKind.CONNECTION_TIMEOUT is caught.value.kind
        assert "100000u" == peer.streams[0].headers["grpc-timeout"]
        with trio.fail_after(1):
            await peer.streams[0].gone.wait()
        assert 0 == engine.pool.statistics().open_streams


async def test_health_numbers_that_nobody_knows(aio_loop: object) -> None:
    """A status that our enum lacks is passed on, not an error."""

    async def script(stream: PeerStream) -> None:
        await stream.send_headers()
        await stream.send_message(b"\x08\x2a")
        await stream.send_trailers()

    async def aio_main(engine: RemoteEngine) -> int:
        return int(await engine.aio_check_health("vllm.Control"))

    async with open_peer(script) as peer, open_remote(settings(peer.port)) as engine:
        assert 42 == await run_aio(aio_main, engine)


@pytest.mark.rule("R5.7")
async def test_bootstrap_uses_one_connection(aio_loop: object) -> None:
    """Bootstrap makes exactly one connection, whatever the settings say."""
    async with open_peer(script_nothing) as peer, open_remote(settings(peer.port, 8), bootstrap=True) as engine:
        assert 1 == len(engine.pool) == len(peer.connections)
        assert "1 idle" in repr(engine)


# -- Against real gRPC servers, on both hosts


def generate(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    name = decode(wire.GenerateRequest, request).request_id
    if name == "missing":
        context.abort(grpc.StatusCode.NOT_FOUND, "no such modèle\n")
    for number in range(100):
        yield encode(tokens(number))
        if name == "slow":
            time.sleep(0.01)
    yield encode(finish(100, total=101))


def echo_info(request: bytes, context: grpc.ServicerContext) -> bytes:
    return encode(wire.ModelInfo(model_id="m" * (5 << 20)))


@contextmanager
def real_server(port: int = 0) -> Iterator[tuple[grpc.Server, int]]:
    """A grpcio server of the parts of the contract that these tests need."""
    server = grpc.server(
        futures.ThreadPoolExecutor(16),
        options=[
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "vllm.Inference", {"GenerateStream": grpc.unary_stream_rpc_method_handler(generate)}
            ),
            grpc.method_handlers_generic_handler(
                "vllm.Control", {"GetModelInfo": grpc.unary_unary_rpc_method_handler(echo_info)}
            ),
        )
    )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield server, bound
    finally:
        server.stop(0).wait()


def test_a_real_server_answers(host: Host) -> None:
    """Forty streams at once over two connections, a refusal and a large answer, through a real gRPC server."""

    async def aio_refused(engine: RemoteEngine) -> None:
        async with engine.aio_generate(wire.GenerateRequest(request_id="missing"), {}) as stream:
            await stream.aio_receive()

    async def aio_unknown(engine: RemoteEngine) -> None:
        await engine.aio_call(GET_SERVER_INFO, wire.GetServerInfoRequest())

    async def aio_large(engine: RemoteEngine) -> int:
        return len((await engine.aio_call(GET_MODEL_INFO, wire.GetModelInfoRequest())).model_id)

    async def main(port: int) -> None:
        got: list[list[int]] = []

        async def one(engine: RemoteEngine) -> None:
            got.append(await run_aio(aio_ids, engine))

        async with open_remote(settings(port, 2)) as engine:
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(one, engine)
            assert [list(range(101))] * 40 == got
            with pytest.raises(RpcError, match="GenerateStream: no such modèle\n \\(NotFound\\)"):
                await run_aio(aio_refused, engine)
            with pytest.raises(RpcError, match=r"GetServerInfo: .*Unimplemented"):
                await run_aio(aio_unknown, engine)
            assert 5 << 20 == await run_aio(aio_large, engine)

    with real_server() as (_, port):
        run(main, port, host=host)


@pytest.mark.rule("E5", "FR-001", "FR-010")
def test_cancelled_generations_are_reset_at_once(host: Host) -> None:
    """Generations that are cancelled before and after their headers are reset with CANCEL on either host."""

    async def script(stream: PeerStream) -> None:
        if len(stream.connection.streams) % 2:
            await stream.send_headers()
        await trio.sleep_forever()

    async def main() -> None:
        async with open_peer(script) as peer, open_remote(settings(peer.port, 2)) as engine:
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(run_aio, aio_ids, engine, {})
                await wait_until(lambda: len(peer.streams) == 100)
                nursery.cancel_scope.cancel()
            await wait_until(lambda: all(stream.reset_codes for stream in peer.streams))
            # Headers that were on their way to a stream that we have reset are answered with STREAM_CLOSED.
            assert {(8,)} <= {tuple(stream.reset_codes) for stream in peer.streams} <= {(8,), (8, 5)}
            assert (0, 2) == (engine.pool.statistics().open_streams, engine.pool.statistics().idle)
            for slot in engine.pool.slots:
                assert isinstance(slot.connection, FastConnection)
                raw = slot.connection.protocol.transport.get_extra_info("socket")
                assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(main, host=host)


async def wait_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what the peer has seen comes over a real socket
            await trio.sleep(0.005)


@pytest.mark.rule("E1")
def test_a_real_server_stops_gracefully(host: Host) -> None:
    """A graceful stop in mid-stream costs no message: twenty of twenty streams get all of theirs."""

    async def aio_slow(engine: RemoteEngine, started: trio.Event) -> int:
        count = 0
        async with engine.aio_generate(wire.GenerateRequest(request_id="slow"), {}) as stream:
            while batch := await stream.aio_receive():
                started.set()
                count += len(batch)
        return count

    async def main(server: grpc.Server, port: int) -> None:
        counts: list[int] = []

        async def one(engine: RemoteEngine, started: trio.Event) -> None:
            counts.append(await run_aio(aio_slow, engine, started))

        async with open_remote(settings(port, 2)) as engine:
            async with trio.open_nursery() as nursery:
                events = [trio.Event() for _ in range(10)]
                for event in events:
                    nursery.start_soon(one, engine, event)
                for event in events:
                    await event.wait()
                server.stop(15)
            assert [101] * 10 == counts

    with real_server() as (server, port):
        run(main, server, port, host=host)


def test_a_real_server_restarts(host: Host) -> None:
    """After a restart on the same port the same pool serves again."""

    async def main(server: grpc.Server, port: int) -> None:
        async with open_remote(settings(port, 2)) as engine:
            assert 101 == len(await run_aio(aio_ids, engine))
            server.stop(0).wait()
            with pytest.raises(RpcError) as caught:
                await run_aio(aio_ids, engine)
            assert StatusCode.UNAVAILABLE is caught.value.status
            with real_server(port), trio.fail_after(10):
                while engine.pool.statistics().idle < 2:  # noqa: ASYNC110 - a real server comes up in its own time
                    await trio.sleep(0.02)
                assert 101 == len(await run_aio(aio_ids, engine))

    with real_server() as (server, port):
        run(main, server, port, host=host)


def test_the_remote_engine_keeps_the_contract() -> None:
    """A type checker sees that the remote engine is an Engine, and the stream method is the contract's."""
    engine: type[Engine] = RemoteEngine
    assert engine is RemoteEngine
    assert GENERATE_STREAM.server_streaming
