"""Structured output: Dynamo's guided decoding options to the one guide that the wire can carry (spec 7.6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trio_sidecar.convert.fields import check_text, describe
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import DecodingParameters, DecodingParametersStringChoices

if TYPE_CHECKING:
    from trio_sidecar.convert.fields import Section

__all__ = ["apply_guide", "compact_json"]

GUIDES = ("json", "regex", "choice", "grammar", "structural_tag")
_UNSUPPORTED = ("backend", "whitespace_pattern")


def apply_guide(guide: Section, decoding: DecodingParameters) -> None:
    """Set the guide on the wire message; an empty section leaves it unset.

    Raises:
        InvalidRequest: A per-request backend or whitespace pattern (R7.12), or more than one guide (R7.13).
    """
    for key in _UNSUPPORTED:
        if guide.get(key) is not None:
            reason = f"{guide.name(key)} is not supported; the backend is the engine's own setting"
            raise InvalidRequest(reason)
    present = [key for key in GUIDES if guide.get(key) is not None]
    if not present:
        return
    if len(present) > 1:
        reason = f"{guide.path} must hold only one guide, got {' and '.join(present)}"
        raise InvalidRequest(reason)
    match present[0]:
        case "json":
            decoding.json = compact_json(guide.get("json"), guide.name("json"))
        case "regex":
            decoding.regex = guide.text("regex")
        case "choice":
            decoding.choice = DecodingParametersStringChoices(choices=guide.texts("choice") or [])
        case "grammar":
            decoding.grammar = guide.text("grammar")
        case _:
            tag = guide.get("structural_tag")
            name = guide.name("structural_tag")
            decoding.structural_tag = check_text(tag, name) if isinstance(tag, str) else compact_json(tag, name)


def compact_json(value: object, name: str) -> str:
    """JSON text without spaces, keys in the order given.

    Raises:
        InvalidRequest: Not a JSON value, or one with numbers or texts that JSON in UTF-8 cannot carry.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"{name} must be a JSON value, got {describe(value)} that JSON cannot carry: {error}"
        raise InvalidRequest(reason) from None
    return check_text(text, name)
