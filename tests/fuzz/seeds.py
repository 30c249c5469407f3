"""Sound inputs of every target, for fuzzers to start from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from h2.config import H2Configuration
from h2.connection import H2Connection

from fuzz.targets import MESSAGES, ROLES
from support import samples
from trio_sidecar import wire
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import convert_request
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["seeds"]

STOP = wire.FinishInfoFinishReason.STOP


def _request() -> wire.GenerateRequest:
    return convert_request(samples.rich_request(), request_id="request-0", model=samples.model_facts()).wire


def _codec() -> list[bytes]:
    everything = [_request(), *_stream(scored=True)]
    return [bytes([MESSAGES.index(type(message))]) + encode(message) for message in everything]


def _stream(*, scored: bool) -> list[wire.GenerateResponse]:
    handoff = struct_from_json(samples.HANDOFF, label="handoff")
    end = samples.finished(3, STOP, stop_token_id=5, kv_transfer_params=handoff, ec_transfer_params=handoff)
    return [
        samples.prompt_info(),
        samples.tokens(1, 2, text="ab", scored=scored),
        samples.tokens(3, text="c", scored=scored, finish=end),
    ]


def _answers() -> list[bytes]:
    found = []
    for scored in (False, True):
        parts = [encode(message) for message in _stream(scored=scored)]
        body = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        found += [bytes([role + 8 * scored, len(samples.PROMPT), 0]) + body for role in range(len(ROLES))]
    return found


def _requests() -> list[bytes]:
    aggregated, decode = ROLES.index(DisaggregationMode.AGGREGATED), ROLES.index(DisaggregationMode.DECODE)
    whole: list[tuple[int, dict[str, Any]]] = [
        (aggregated, samples.rich_request()),
        (decode, samples.decode_request()),
        (aggregated | 128, samples.media_request()),
        (aggregated | 128, samples.features_request()),
        (
            aggregated,
            samples.minimal_request(extra_args={"vllm_tito": {"sampling_params": samples.ENVELOPE_SAMPLING}}),
        ),
    ]
    return [bytes([role]) + json.dumps(request).encode() for role, request in whole]


def _http2(side: H2Connection, headers: Sequence[tuple[str, str]], body: bytes, stream_id: int) -> bytes:
    side.send_headers(stream_id, headers)
    side.send_data(stream_id, b"\0" + len(body).to_bytes(4, "big") + body)
    side.ping(b"12345678")
    side.increment_flow_control_window(1000)
    return side.data_to_send()


def _server_face() -> list[bytes]:
    client = H2Connection()
    client.initiate_connection()
    client.get_next_available_stream_id()
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")])
    client.data_to_send()
    body = encode(_request())
    client.send_data(1, b"\0" + len(body).to_bytes(4, "big") + body, end_stream=True)
    first = client.data_to_send()
    headers = [(":method", "POST"), (":path", "/vllm.Inference/Generate"), (":scheme", "http"), (":authority", "x")]
    more = [("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", "1S"), ("x-a", "b")]
    second = _http2(client, [*headers, *more], body, 3)
    client.reset_stream(3)
    return [part + first + second + client.data_to_send() for part in (b"\0\0", b"\0\x40", b"\xff\0")]


def _client_connection() -> list[bytes]:
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    server.data_to_send()
    client = H2Connection()
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")])
    server.receive_data(client.data_to_send())
    headers = [(":status", "200"), ("content-type", "application/grpc")]
    answer = _http2(server, headers, encode(samples.tokens(1)), 1)
    server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    answer += server.data_to_send()
    goaway = b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\0"
    return [b"\0\0" + answer, b"\0\x20" + answer + goaway]


def seeds(target: str) -> list[bytes]:
    """Sound inputs of one target."""
    makers = {
        "codec": _codec,
        "answers": _answers,
        "requests": _requests,
        "server-face": _server_face,
        "client-connection": _client_connection,
    }
    return makers[target]()
