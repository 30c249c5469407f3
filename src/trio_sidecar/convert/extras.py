"""Cache identity and the whitelist of ``extra_args`` (spec 7.7 and 7.9).

Everything in ``extra_args`` either reaches the engine or is refused by name: what gets lost would change answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.convert.features import ROUTING_HASHES
from trio_sidecar.convert.fields import Section, describe
from trio_sidecar.convert.legacy import ENVELOPE
from trio_sidecar.errors import InvalidRequest

if TYPE_CHECKING:
    from trio_sidecar.convert.legacy import Envelope

__all__ = ["Extras", "cache_namespace", "cache_salt", "check_nvext", "read_extras", "without_reasoning_hints"]

CACHE_SALT_PREFIX = "dynamo-cache-salt:"
"""Equals the constant of Dynamo's KV router, or its view of the cache would not match the engine's (R7.18)."""

_CANONICAL_BYPASS = "bypass_prefix_cache"
_BYPASS_ALIAS = "skip_reading_prefix_cache"
_KV = "kv_transfer_params"
_ALLOWED = (_CANONICAL_BYPASS, _BYPASS_ALIAS, _KV)

# What media say better themselves; a text request has no use for them, so there they are refused (R7.23).
_SAID_BY_MEDIA = frozenset({"messages", "formatted_prompt", "mm_hashes"})

# The front end answers these by itself; the engine has nothing to add.
_FRONT_END_FIELDS = frozenset({"worker_id", "timing"})
_REASONING_HINTS = ("reasoning_parser_kwargs", "reasoning_ended")


@attrs.frozen(kw_only=True)
class Extras:
    """What ``extra_args`` may ask of the engine.

    Attributes:
        bypass_prefix_cache: Do not read the prefix cache.
        has_kv: Whether a handoff payload was given; it may be null, which is not the same as absent.
        kv_transfer_params: That payload.
    """

    bypass_prefix_cache: bool = False
    has_kv: bool = False
    kv_transfer_params: object = None


def cache_namespace(routing: Section) -> str | None:
    """The caller's cache namespace, None if there is none; an empty one is one.

    Dynamo 1.6 spells the field ``cache_salt``, its successor ``cache_namespace``.
    """
    namespace, salt = routing.text("cache_namespace"), routing.text("cache_salt")
    if namespace is not None and salt is not None and namespace != salt:
        reason = f"{routing.name('cache_salt')} must equal {routing.name('cache_namespace')}"
        raise InvalidRequest(reason)
    return salt if namespace is None else namespace


def cache_salt(namespace: str | None) -> str:
    """The engine's cache salt. The prefix is always added, so that no namespace can pose as another (R7.16)."""
    return "" if namespace is None else CACHE_SALT_PREFIX + namespace


def without_reasoning_hints(extra_args: object, reasoning_parser: str) -> object:
    """``extra_args`` without hints for a reasoning parser that the engine does not have (R7.30)."""
    if reasoning_parser.strip() or not isinstance(extra_args, Mapping):
        return extra_args
    return {key: value for key, value in extra_args.items() if key not in _REASONING_HINTS}


def check_nvext(extra_args: Mapping[str, object], namespace: str | None) -> None:
    """Check NVIDIA's request extension; all that it may hold has been honoured elsewhere (R7.24 to R7.29)."""
    raw = extra_args.get("nvext")
    if not isinstance(raw, Mapping):
        return
    nvext = Section(raw, "extra_args.nvext")
    for key in raw:
        match key:
            case "cache_salt":
                _check_salt(nvext, namespace)
            case "token_in":
                if raw[key] is not True:
                    raise nvext.refuse(key, "true")
            case "extra_fields":
                _check_extra_fields(nvext)
            case _:
                raise _unsupported(nvext.name(key), "cache_salt, token_in, extra_fields")


def _check_salt(nvext: Section, namespace: str | None) -> None:
    key = "cache_salt"
    salt = nvext.get(key)
    if not isinstance(salt, str) or not salt:
        raise nvext.refuse(key, "a non-empty string")
    if salt != namespace:
        reason = f"{nvext.name(key)} does not match the cache namespace of the request's routing"
        raise InvalidRequest(reason)


def _check_extra_fields(nvext: Section) -> None:
    name = nvext.name("extra_fields")
    fields = nvext.get("extra_fields")
    if not isinstance(fields, list):
        reason = f"{name} must be an array"
        raise InvalidRequest(reason)
    for field in fields:
        if not isinstance(field, str) or field not in _FRONT_END_FIELDS:
            reason = f"{name}: {describe(field)}"
            raise _unsupported(reason, ", ".join(sorted(_FRONT_END_FIELDS)))


def read_extras(extra_args: Mapping[str, object], envelope: Envelope | None, *, has_media: bool) -> Extras:
    """Check the whitelist (R7.22, R7.23) and read what it lets through (R7.68, R7.69)."""
    for key, value in extra_args.items():
        consumed = key in _ALLOWED or key in (ENVELOPE, ROUTING_HASHES) or (has_media and key in _SAID_BY_MEDIA)
        if not consumed and not (key == "nvext" and isinstance(value, Mapping)):
            reason = f"extra_args.{key}"
            raise _unsupported(reason, ", ".join((*_ALLOWED, "nvext")))
    has_kv, kv = _KV in extra_args, extra_args.get(_KV)
    if not has_kv and envelope is not None and envelope.kv_transfer_params is not None:
        has_kv, kv = True, envelope.kv_transfer_params
    return Extras(bypass_prefix_cache=_bypass(extra_args, envelope), has_kv=has_kv, kv_transfer_params=kv)


def _bypass(extra_args: Mapping[str, object], envelope: Envelope | None) -> bool:
    asked: list[bool] = []
    # Both names are checked even where the first one decides.
    for key in (_CANONICAL_BYPASS, _BYPASS_ALIAS):
        if key in extra_args:
            value = extra_args[key]
            if not isinstance(value, bool):
                reason = f"extra_args.{key} must be a boolean, got {describe(value)}"
                raise InvalidRequest(reason)
            asked.append(value)
    legacy = envelope.bypass_prefix_cache if envelope is not None else None
    if legacy is not None:
        asked.append(legacy)
    return asked[0] if asked else False


def _unsupported(what: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{what} is not supported by vLLM gRPC; allowed are {allowed}")
