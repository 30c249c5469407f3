"""Roles and the make-believe handoff."""

from __future__ import annotations

from typing import Any

import pytest

from support.mock_engine import answers_to, finish_of, request_of, token_settings
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.engines.mock_handoff import check_role, handoff
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import KvCacheParameters, ListValue, NullValue, Struct, Value

AGG, PREFILL, DECODE = DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
INVALID, WRONG_ROLE = StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION
TRUE, FALSE = Value(bool_value=True), Value(bool_value=False)


def kv(**fields: Value) -> KvCacheParameters:
    """Transfer parameters."""
    return KvCacheParameters(kv_transfer_params=Struct(fields=fields))


def handed(**changes: Value | None) -> KvCacheParameters:
    """A good handoff, changed."""
    fields: dict[str, Any] = {**handoff(65, "r").fields, **changes}
    return kv(**{name: value for name, value in fields.items() if value is not None})


REFUSED = [
    ("agg decode role", AGG, kv(do_remote_prefill=TRUE), WRONG_ROLE, "aggregated"),
    ("agg prefill role", AGG, kv(do_remote_decode=TRUE), WRONG_ROLE, "aggregated"),
    ("both", AGG, kv(do_remote_decode=TRUE, do_remote_prefill=TRUE), INVALID, "both true"),
    ("not a flag", AGG, kv(do_remote_decode=Value(number_value=1)), INVALID, "do_remote_decode"),
    ("prefill without", PREFILL, None, WRONG_ROLE, "do_remote_decode"),
    ("prefill false", PREFILL, kv(do_remote_decode=FALSE), WRONG_ROLE, "do_remote_decode"),
    (
        "prefill rendezvous",
        PREFILL,
        kv(do_remote_decode=TRUE, remote_host=Value(string_value="h")),
        INVALID,
        "remote_host",
    ),
    ("decode without", DECODE, None, WRONG_ROLE, "handoff"),
    ("decode false", DECODE, kv(do_remote_prefill=FALSE), WRONG_ROLE, "handoff"),
    ("no sentinel", DECODE, handed(mocker_request_id=None), INVALID, "mocker_request_id"),
    ("empty sentinel", DECODE, handed(mocker_request_id=Value(string_value="")), INVALID, "mocker_request_id"),
    ("no engine", DECODE, handed(remote_engine_id=None), INVALID, "remote_engine_id"),
    ("no host", DECODE, handed(remote_host=None), INVALID, "remote_host"),
    ("no port", DECODE, handed(remote_port=None), INVALID, "remote_port"),
    ("bad port", DECODE, handed(remote_port=Value(string_value="x")), INVALID, "remote_port"),
    ("no blocks", DECODE, handed(remote_block_ids=Value(list_value=ListValue())), INVALID, "remote_block_ids"),
    ("bad blocks", DECODE, handed(remote_block_ids=Value(number_value=1)), INVALID, "remote_block_ids"),
]


@pytest.mark.rule("R16.3", "R16.13")
@pytest.mark.parametrize(
    ("mode", "params", "status", "word"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused(mode: DisaggregationMode, params: KvCacheParameters | None, status: StatusCode, word: str) -> None:
    """Another role's request and a malformed handoff are told apart, and the message names the field."""
    with pytest.raises(RpcError, match=word) as caught:
        check_role(params, mode)
    assert status == caught.value.status


@pytest.mark.rule("R16.13", "FR-074")
@pytest.mark.parametrize(
    ("mode", "params"),
    [
        (AGG, None),
        (AGG, kv(do_remote_prefill=FALSE, do_remote_decode=FALSE)),
        (PREFILL, kv(do_remote_decode=TRUE, remote_host=Value(null_value=NullValue.NULL_VALUE))),
        (DECODE, handed()),
        (DECODE, handed(remote_port=Value(string_value="5600"))),
    ],
)
def test_accepted(mode: DisaggregationMode, params: KvCacheParameters | None) -> None:
    """A port may come as text, because workers send it so, and a null is as good as nothing."""
    check_role(params, mode)


@pytest.mark.rule("R16.13", "R16.17")
def test_round_trip() -> None:
    """What a prefill mock hands over is what a decode mock takes; one block id per 64 prompt tokens."""
    prompt = range(1, 66)
    first = answers_to(
        request_of(prompt, request_id="r", kv=kv(do_remote_decode=TRUE), stopping={"max_new_tokens": 1}),
        token_settings(disaggregation_mode=PREFILL),
    )
    params = finish_of(first).kv_transfer_params
    assert params is not None
    blocks = params.fields["remote_block_ids"].list_value
    assert blocks is not None
    assert 2 == len(blocks.values)
    assert "r" == params.fields["mocker_request_id"].string_value
    decoded = answers_to(
        request_of(prompt, kv=KvCacheParameters(kv_transfer_params=params), stopping={"max_new_tokens": 3}),
        token_settings(disaggregation_mode=DECODE),
    )
    assert (3, None) == (finish_of(decoded).num_output_tokens, finish_of(decoded).kv_transfer_params)
