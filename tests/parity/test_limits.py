"""Sizes, encodings and names at the edge of the transport, on both servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support import vllm_model
from support.deviations import deviation
from support.parity import refusal, request
from support.vllm_servers import MODEL

if TYPE_CHECKING:
    from support.parity import Pair, Server

MIB = 1 << 20
FEW = {"max_new_tokens": 2}


def code_of(server: Server, path: str, data: bytes, **options: Any) -> str:
    """The status of a call with these bytes."""
    try:
        server.channel.unary_unary(path)(data, timeout=30, **options)
    except grpc.RpcError as error:
        return refusal(error).code
    return "OK"


def test_a_large_request(both: Pair) -> None:
    """Five MiB are no trouble."""
    both.agree(request([5], session_id="s" * 5 * MIB, stopping=FEW))


@pytest.mark.parametrize("path", ["/vllm.Inference/Generate", "/vllm.Inference/GenerateStream", "/vllm.Control/Abort"])
def test_a_message_beyond_the_limit(both: Pair, path: str) -> None:
    """More than 32 MiB are refused without being read, with the status that vllm-rs uses."""
    data = b"\x0a\x80\x80\x80\x10" + b"x" * (32 * MIB)
    assert ["OUT_OF_RANGE"] * 2 == [code_of(server, path, data) for server in both]


def test_a_large_health_request(both: Pair) -> None:
    """Health has the same limit as the rest with us, and a lower one with vllm-rs."""
    deviation("health-size")
    data = b"\x0a\x80\x80\xc0\x02" + b"x" * (5 * MIB)
    path = "/grpc.health.v1.Health/Check"
    assert ["NOT_FOUND", "OUT_OF_RANGE"] == [code_of(server, path, data) for server in both]


def test_a_large_answer(plain: Pair) -> None:
    """There is no limit on what the server sends: more than four MiB arrive in one message."""
    response = {"prompt_logprobs": True, "prompt_candidates": {"all": True}}
    message = request([5, 9] * 400, stopping={"max_new_tokens": 1}, response=response)
    for server in plain:
        first, *_ = server.open(message)
        rows = first.prompt_info.candidate_tokens
        assert [0, *[vllm_model.VOCAB] * 799] == [len(row.tokens) for row in rows]
        assert first.ByteSize() > 4 * MIB


@pytest.mark.parametrize(
    "path",
    [
        "/vllm.Inference/Nothing",
        "/vllm.Nothing/Generate",
        "/vllm.Generate/Generate",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
    ],
)
def test_unknown_methods(both: Pair, path: str) -> None:
    """There is nothing but the three services."""
    assert ["UNIMPLEMENTED"] * 2 == [code_of(server, path, b"") for server in both]


def test_compressed_requests(both: Pair) -> None:
    """They are not supported."""
    data = request([5], session_id="s" * 50_000, stopping=FEW).SerializeToString()
    codes = [code_of(server, "/vllm.Inference/Generate", data, compression=grpc.Compression.Gzip) for server in both]
    assert ["UNIMPLEMENTED"] * 2 == codes


def test_many_at_once(both: Pair) -> None:
    """More requests than the engine runs at once all come to the same end as one alone."""
    alone = both.agree(request("Hello", model=MODEL, stopping={"max_new_tokens": 20})).said["text"]
    for server in both:
        call = server.call("vllm.Inference/Generate")
        message = request("Hello", stopping={"max_new_tokens": 20})
        futures = [call.future(message, timeout=60) for _ in range(24)]
        assert {alone} == {future.result().outputs.text for future in futures}
