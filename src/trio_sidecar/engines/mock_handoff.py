"""The make-believe transfer of KV blocks between a prefill and a decode mock (R16.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import KvCacheParameters, ListValue, Struct, Value

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["check_role", "handoff"]

TOKENS_PER_HANDOFF_BLOCK = 64
SENTINEL = "mocker_request_id"
"""Proves to the decode mock that the handoff came from a prefill mock."""

_LONERS = (DisaggregationMode.AGGREGATED, DisaggregationMode.ENCODE)
"""Roles that hand no KV blocks over and take none."""

_RENDEZVOUS = ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids", SENTINEL)


def check_role(kv: KvCacheParameters | None, mode: DisaggregationMode) -> None:
    """Check that the transfer parameters fit the role this server plays.

    Raises:
        RpcError: FAILED_PRECONDITION for another role's request, INVALID_ARGUMENT for a malformed one.
    """
    fields = {} if kv is None or kv.kv_transfer_params is None else kv.kv_transfer_params.fields
    decode_later, prefilled = (_flag(fields, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if decode_later and prefilled:
        _invalid("do_remote_decode and do_remote_prefill are both true; one request has one role")
    if mode in _LONERS:
        if decode_later or prefilled:
            _wrong_role(f"an {mode.name.lower()} server takes no prefill or decode request")
    elif mode is DisaggregationMode.PREFILL:
        if not decode_later:
            _wrong_role("a prefill server needs kv_transfer_params.do_remote_decode true")
        # A sidecar names the fields with null values; only values that say something are a rendezvous.
        extra = [name for name in _RENDEZVOUS if name in fields and fields[name].null_value is None]
        if extra:
            _invalid(f"kv_transfer_params.{extra[0]} must be absent in a prefill request")
    else:
        if not prefilled:
            _wrong_role("a decode server needs a handoff: kv_transfer_params.do_remote_prefill true")
        _check_handoff(fields)


def handoff(prompt_len: int, request_id: str) -> Struct:
    """What a prefill mock sends along for the decode mock."""
    blocks = -(-prompt_len // TOKENS_PER_HANDOFF_BLOCK)
    return Struct(
        fields={
            "do_remote_decode": Value(bool_value=False),
            "do_remote_prefill": Value(bool_value=True),
            "remote_engine_id": Value(string_value="mocker-prefill"),
            "remote_host": Value(string_value="127.0.0.1"),
            "remote_port": Value(number_value=0.0),
            "remote_block_ids": Value(
                list_value=ListValue(values=[Value(number_value=float(block)) for block in range(blocks)])
            ),
            SENTINEL: Value(string_value=request_id),
        }
    )


def _check_handoff(fields: dict[str, Value]) -> None:
    for name in _RENDEZVOUS:
        if name not in fields:
            _invalid(f"kv_transfer_params.{name} is missing from the handoff")
    for name in ("remote_engine_id", "remote_host", SENTINEL):
        if not fields[name].string_value:
            _invalid(f"kv_transfer_params.{name} must be text that is not empty")
    port = fields["remote_port"]
    # A worker sends the port as text, because some engines would otherwise read 5600 as 5600.0 (FR-074).
    if port.number_value is None and not (port.string_value or "").isdigit():
        _invalid("kv_transfer_params.remote_port must be a number")
    blocks = fields["remote_block_ids"].list_value
    if blocks is None or not blocks.values or any(each.number_value is None for each in blocks.values):
        _invalid("kv_transfer_params.remote_block_ids must be a list of numbers that is not empty")


def _flag(fields: dict[str, Value], name: str) -> bool:
    value = fields.get(name)
    if value is None or value.null_value is not None:
        return False
    if value.bool_value is None:
        _invalid(f"kv_transfer_params.{name} must be true or false")
    return value.bool_value


def _invalid(reason: str) -> NoReturn:
    raise RpcError(StatusCode.INVALID_ARGUMENT, reason)


def _wrong_role(reason: str) -> NoReturn:
    raise RpcError(StatusCode.FAILED_PRECONDITION, reason)
