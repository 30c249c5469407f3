"""JSON bodies of controls and updates as messages (spec 12.2, 12.3); pure.

Every reader raises InvalidRequest, which names the member, the value and what is allowed. Null counts as absent
(R12.5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

from trio_sidecar.convert.fields import MAX_UINT32, describe
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import (
    FinishWeightUpdateRequest,
    PauseGenerationRequest,
    PauseMode,
    SleepRequest,
    UpdateWeightVersionRequest,
    WakeUpRequest,
)

Body: TypeAlias = Mapping[str, object]

_MODES = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}
_LEVELS = (0, 1, 2)
_TAGS = ("weights", "kv_cache", "scheduling")


def check_control_body(name: str, body: object) -> None:
    """Check what can be checked of a control's body without an engine (R12.6).

    Raises:
        InvalidRequest: It is no object; or, for a control that changes the engine, a member of it is not allowed.
    """
    fields = read_object(name, body)
    match name:
        case "pause_generation":
            read_pause(fields)
        case "sleep":
            read_sleep(fields)
        case "wake_up":
            read_wake_up(fields)


def read_object(name: str, body: object) -> Body:
    """The body itself, which must be an object."""
    if not isinstance(body, Mapping):
        reason = f"{name}: the body must be a JSON object, got {describe(body)}"
        raise InvalidRequest(reason)
    return body


def read_pause(body: Body) -> PauseGenerationRequest:
    """What ``pause_generation`` asks for; the engine decides about the cache unless told."""
    clear_cache = body.get("clear_cache")
    if clear_cache is not None and not isinstance(clear_cache, bool):
        reason = f"pause_generation: clear_cache must be a boolean, got {describe(clear_cache)}"
        raise InvalidRequest(reason)
    return PauseGenerationRequest(mode=_mode("pause_generation", body), clear_cache=clear_cache)


def read_sleep(body: Body) -> SleepRequest:
    """What ``sleep`` asks for."""
    level = body.get("level")
    if level is not None:
        # True is an int in Python, and 1.0 is no whole number on the wire.
        if type(level) is not int or not 0 <= level <= MAX_UINT32:
            reason = f"sleep: level must be a uint32, got {describe(level)}"
            raise InvalidRequest(reason)
        if level not in _LEVELS:
            reason = f"sleep: level must be one of 0, 1, or 2, got {level}"
            raise InvalidRequest(reason)
    return SleepRequest(level=level, mode=_mode("sleep", body))


def read_wake_up(body: Body) -> WakeUpRequest:
    """What ``wake_up`` asks for; without tags, everything."""
    tags = body.get("tags")
    if tags is None:
        return WakeUpRequest()
    if not isinstance(tags, list):
        reason = f"wake_up: tags must be an array of strings, got {describe(tags)}"
        raise InvalidRequest(reason)
    for tag in tags:
        if not isinstance(tag, str):
            reason = f"wake_up: tags must hold only strings, got {describe(tag)}"
            raise InvalidRequest(reason)
        if tag not in _TAGS:
            reason = f"wake_up: a tag must be weights, kv_cache, or scheduling, got {describe(tag)}"
            raise InvalidRequest(reason)
    return WakeUpRequest(tags=tags)


def _mode(name: str, body: Body) -> PauseMode:
    mode = body.get("mode")
    if mode is None:
        return PauseMode.ABORT
    if not isinstance(mode, str) or mode not in _MODES:
        reason = f"{name}: mode must be abort, wait, or keep, got {describe(mode)}"
        raise InvalidRequest(reason)
    return _MODES[mode]


def read_inner_object(body: Body, field: str) -> bytes:
    """A member that the engine reads itself, as JSON."""
    value = body.get(field)
    if not isinstance(value, Mapping):
        reason = f"{field} must be a JSON object, got {describe(value)}"
        raise InvalidRequest(reason)
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        reason = f"{field} must be a JSON object: {error}"
        raise InvalidRequest(reason) from error


def read_finish(body: Body) -> FinishWeightUpdateRequest:
    """What ``finish_weight_update`` asks for; without a version the engine keeps the one it has."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        reason = f"weight_version must be a string, got {describe(version)}"
        raise InvalidRequest(reason)
    return FinishWeightUpdateRequest(weight_version=version)


def read_version(body: Body) -> UpdateWeightVersionRequest:
    """What ``update_weight_version`` asks for."""
    version = body.get("new_version")
    if not isinstance(version, str) or not version:
        reason = f"new_version must be a non-empty string, got {describe(version)}"
        raise InvalidRequest(reason)
    return UpdateWeightVersionRequest(weight_version=version)
