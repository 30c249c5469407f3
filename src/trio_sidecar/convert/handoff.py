"""Payloads that pass from one worker's engine to another's through the request (spec 7.10).

They are the connectors' own business: opaque, and sent on as they came, but for the few members named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trio_sidecar.convert.fields import describe
from trio_sidecar.convert.modes import KvSource, ModeRules
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.errors import InvalidRequest

if TYPE_CHECKING:
    from trio_sidecar.convert.extras import Extras
    from trio_sidecar.convert.fields import Section
    from trio_sidecar.wire import Struct

__all__ = ["EC_PARAMS", "KV_PARAMS", "PROMPT_IDS_KEY", "ec_transfer_params", "kv_transfer_params", "refuse_callers"]

KV_PARAMS = "kv_transfer_params"
EC_PARAMS = "ec_transfer_params"

PROMPT_IDS_KEY = "_dynamo_sidecar_multimodal_prompt_token_ids"
"""Private member of a handoff: the prompt with its media expanded, from prefill to decode (R7.35, R8.30).

No engine must see it. The Rust sidecar uses the same name, so that the two may work side by side.
"""

_PORT = "remote_port"
_MAX_PORT = 2**64 - 1


def kv_transfer_params(top: Section, extras: Extras, rules: ModeRules, *, has_media: bool) -> Struct | None:
    """What the engine's KV connector gets.

    Args:
        top: The request.
        extras: The caller's own wishes.
        rules: This worker's role.
        has_media: Whether the request has media.

    Raises:
        InvalidRequest: A payload is missing, or is not an object that a Struct can carry.
    """
    match rules.kv_source:
        case KvSource.CALLER:
            if not extras.has_kv:
                return None
            payload = extras.kv_transfer_params
        case KvSource.CALLER_FORCED:
            payload = _for_prefill(extras)
        case KvSource.PREFILL_RESULT:
            payload = _from_prefill(top, has_media=has_media)
        case _:
            return None
    return struct_from_json(payload, label=KV_PARAMS)


def refuse_callers(extras: Extras, rules: ModeRules) -> None:
    """Take no KV transfer parameters that the caller has made (FR-082).

    They name the peer from which the engine fetches. Where the role ignores them anyway, they are no fault.

    Raises:
        InvalidRequest: There are some.
    """
    if extras.has_kv and rules.kv_source in {KvSource.CALLER, KvSource.CALLER_FORCED}:
        reason = f"extra_args.{KV_PARAMS} must be absent: this worker takes none from callers (--caller-handoff off)"
        raise InvalidRequest(reason)


def _for_prefill(extras: Extras) -> dict[str, object]:
    given = extras.kv_transfer_params if extras.has_kv else {}
    if not isinstance(given, Mapping):
        reason = f"extra_args.{KV_PARAMS} must be a JSON object, got {describe(given)}"
        raise InvalidRequest(reason)
    return {**given, "do_remote_decode": True}


def _from_prefill(top: Section, *, has_media: bool) -> dict[str, object]:
    key = "prefill_result"
    if top.get(key) is None:
        reason = f"{key} is required in decode mode: it brings the KV handoff of the prefill worker"
        raise InvalidRequest(reason)
    result = top.section(key)
    member = "disaggregated_params"
    handoff = result.get(member)
    if not isinstance(handoff, Mapping):
        raise result.refuse(member, "a JSON object")
    params = dict(handoff)
    if has_media:
        # The engine expands the media of the original prompt again, for their positions.
        params.pop(PROMPT_IDS_KEY, None)
    port = _port_text(params.get(_PORT))
    if port is not None:
        params[_PORT] = port
    return params


def _port_text(port: object) -> str | None:
    """A whole port number as text, else None.

    A Struct has doubles only, and a connector would turn 5600.0 into a URL that ends in ``:5600.0`` (R7.34, FR-074).
    """
    if isinstance(port, bool) or not isinstance(port, int | float):
        return None
    if not 0 <= port <= _MAX_PORT or port != int(port):
        return None
    return str(int(port))


def ec_transfer_params(top: Section, rules: ModeRules) -> Struct | None:
    """What the engine's encoder connector gets: the result of an encode worker (R7.36)."""
    key = "encoder_result"
    result = top.get(key)
    if result is None or not rules.takes_encoder_result:
        return None
    if not isinstance(result, Mapping):
        raise top.refuse(key, "a JSON object")
    return struct_from_json(result, label=EC_PARAMS)
