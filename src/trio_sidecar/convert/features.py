"""Media that a renderer has prepared already: tensors and their places in the prompt (spec 7.12).

An item's identity in caches is made from its content, never taken from whoever sent it: two requests that say the same
name for different images would otherwise answer with each other's.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping

import attrs

from trio_sidecar.convert.fields import MAX_UINT64, Section, describe
from trio_sidecar.convert.media import MODALITIES
from trio_sidecar.convert.xxh3 import xxh3_64
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import MediaItem, PreprocessedMediaFeatures

__all__ = [
    "MAX_KWARGS_BYTES",
    "ROUTING_HASHES",
    "Features",
    "content_hash",
    "read_features",
    "read_routing_hashes",
    "routing_hash",
]

ROUTING_HASHES = "dynamo_mm_routing_hashes"

MAX_KWARGS_BYTES = 16 * 1024 * 1024
"""Limit of all decoded payloads of a request together, in bytes; the engine has the same."""

_IDENTITY_DOMAIN = b"vllm.grpc.preprocessed-mm.v1"
_IDENTITY_PREFIX = "grpc-mm:"
_MEMBERS = ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata")
_PLACEHOLDER_MEMBERS = ("offset", "length", "is_embed")


@attrs.frozen(kw_only=True)
class Placeholder:
    """Where an item is in the prompt, in tokens.

    Attributes:
        offset: Its first token.
        length: How many tokens it takes.
        is_embed: Which of them stand for the item; empty means all.
    """

    offset: int
    length: int
    is_embed: list[bool]


@attrs.frozen(kw_only=True)
class Features:
    """Prepared media whose shape has been checked; each map goes from modality to one entry per item.

    Attributes:
        path: How messages call the whole.
        hashes: The producer's names, which nothing relies on.
        placeholders: Where the items are.
        kwargs: The encoded payloads.
    """

    path: str
    hashes: Mapping[str, list[str]]
    placeholders: Mapping[str, list[Placeholder]]
    kwargs: Mapping[str, list[str]]

    def items(self, *, prompt_tokens: int, routing_hashes: list[str] | None, lora_name: str) -> list[MediaItem]:
        """The wire's media items, modalities in the order of their names (R7.59).

        Args:
            prompt_tokens: Length of the prompt, in tokens.
            routing_hashes: What the router calls the images; None if it has no say.
            lora_name: The adapter that the request names; its items are another's (R7.53, R7.60).

        Raises:
            InvalidRequest: The maps contradict each other, the prompt or the router.
        """
        self._check_modalities()
        images = len(self.hashes.get("image", ()))
        if routing_hashes is not None and len(routing_hashes) != images:
            reason = f"{ROUTING_HASHES} must have one entry per image, got {len(routing_hashes)} for {images}"
            raise InvalidRequest(reason)
        budget = MAX_KWARGS_BYTES
        items: list[MediaItem] = []
        for name in sorted(self.hashes):
            for position in range(self._count(name)):
                placeholder = self._placeholder(name, position, prompt_tokens)
                payload = self._payload(name, position, budget)
                budget -= len(payload)
                identity = content_hash(name, payload)
                marker = None
                if routing_hashes is not None and name == "image":
                    marker = _checked_marker(routing_hashes, position, identity)
                features = PreprocessedMediaFeatures(
                    kwargs=payload,
                    identifier=f"{lora_name}:{identity}" if lora_name else marker or identity,
                    offset=placeholder.offset,
                    length=placeholder.length,
                    mm_hash=identity,
                    is_embed=placeholder.is_embed,
                )
                items.append(MediaItem(modality=MODALITIES[name], features=features))
        return items

    def _check_modalities(self) -> None:
        if not self.hashes:
            reason = f"{self.path}.mm_hashes must not be empty"
            raise InvalidRequest(reason)
        if not self.hashes.keys() == self.placeholders.keys() == self.kwargs.keys():
            reason = f"{self.path}: the modalities must match in mm_hashes, mm_placeholders and kwargs_data"
            raise InvalidRequest(reason)

    def _count(self, name: str) -> int:
        if name not in MODALITIES:
            allowed = ", ".join(MODALITIES)
            reason = f"{self.path}: {describe(name)} is an unsupported preprocessed modality; allowed are {allowed}"
            raise InvalidRequest(reason)
        counts = [len(each[name]) for each in (self.hashes, self.placeholders, self.kwargs)]
        if len(set(counts)) > 1:
            reason = f"{self.path}: modality {name} has mismatched item counts {counts} ({', '.join(_MEMBERS[:3])})"
            raise InvalidRequest(reason)
        return counts[0]

    def _placeholder(self, name: str, position: int, prompt_tokens: int) -> Placeholder:
        placeholder = self.placeholders[name][position]
        where = f"{self.path}.mm_placeholders.{name}[{position}]"
        offset, length = placeholder.offset, placeholder.length
        if not self.hashes[name][position]:
            reason = f"{self.path}.mm_hashes.{name}[{position}] is an empty hash; it must be a non-empty string"
        elif not length:
            reason = f"{where} is an empty placeholder; its length must be at least 1"
        elif offset + length > MAX_UINT64:
            reason = f"{where} is a range that would overflow: offset {offset}, length {length}"
        elif offset + length > prompt_tokens:
            reason = f"{where} exceeds the prompt: offset {offset}, length {length}, but {prompt_tokens} tokens"
        elif placeholder.is_embed and len(placeholder.is_embed) != length:
            reason = f"{where}.is_embed must be empty or have {length} entries, got {len(placeholder.is_embed)}"
        else:
            return placeholder
        raise InvalidRequest(reason)

    def _payload(self, name: str, position: int, budget: int) -> bytes:
        """Decode a payload; what cannot fit any more is refused before it is decoded (R7.58)."""
        encoded = self.kwargs[name][position]
        where = f"{self.path}.kwargs_data.{name}[{position}]"
        if not encoded:
            reason = f"{where} must not be empty"
            raise InvalidRequest(reason)
        if len(encoded) > (budget + 2) // 3 * 4 + 4:
            raise _too_large(self.path)
        payload = _decode(encoded, where)
        if len(payload) > budget:
            raise _too_large(self.path)
        return payload


def content_hash(modality: str, payload: bytes) -> str:
    """The identity of an item's content (R7.52)."""
    digest = hashlib.sha256(_IDENTITY_DOMAIN)
    for part in (modality.encode(), payload):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return _IDENTITY_PREFIX + digest.hexdigest()


def routing_hash(identity: str) -> str:
    """What Dynamo's router calls an item of that identity: 16 hex digits, then 48 zeros (R7.54)."""
    return f"{xxh3_64(identity.encode()):016x}".ljust(64, "0")


def read_features(raw: object, path: str) -> Features:
    """Check the shape of prepared media.

    Raises:
        InvalidRequest: A member is missing, unknown or of a wrong type; the message names it.
    """
    if not isinstance(raw, Mapping):
        reason = f"{path} must be a JSON object, got {describe(raw)}"
        raise InvalidRequest(reason)
    members = Section(raw, path)
    _refuse_unknown(members, _MEMBERS)
    return Features(
        path=path,
        hashes={name: _texts(entries, name) for name, entries in _modalities(members, "mm_hashes")},
        placeholders={name: _placeholders(entries, name) for name, entries in _modalities(members, "mm_placeholders")},
        kwargs={name: _texts(entries, name) for name, entries in _modalities(members, "kwargs_data")},
    )


def _modalities(members: Section, key: str) -> list[tuple[str, Section]]:
    if members.get(key) is None:
        reason = f"{members.name(key)} is required"
        raise InvalidRequest(reason)
    section = members.section(key)
    return [(name, section) for name in section.values]


def _texts(section: Section, name: str) -> list[str]:
    texts = section.texts(name)
    if texts is None:
        raise section.refuse(name, "an array")
    return texts


def _placeholders(section: Section, name: str) -> list[Placeholder]:
    entries = section.get(name)
    if not isinstance(entries, list):
        raise section.refuse(name, "an array")
    placeholders: list[Placeholder] = []
    for position, entry in enumerate(entries):
        where = f"{section.name(name)}[{position}]"
        if not isinstance(entry, Mapping):
            reason = f"{where} must be a JSON object, got {describe(entry)}"
            raise InvalidRequest(reason)
        placeholders.append(_read_placeholder(Section(entry, where)))
    return placeholders


def _read_placeholder(entry: Section) -> Placeholder:
    _refuse_unknown(entry, _PLACEHOLDER_MEMBERS)
    offset, length = (entry.integer(key, 0, MAX_UINT64) for key in ("offset", "length"))
    if offset is None or length is None:
        reason = f"{entry.name('offset' if offset is None else 'length')} is required"
        raise InvalidRequest(reason)
    key = "is_embed"
    mask = entry.get(key)
    if mask is None:
        mask = []
    if not isinstance(mask, list) or not all(isinstance(bit, bool) for bit in mask):
        raise entry.refuse(key, "an array of booleans")
    return Placeholder(offset=offset, length=length, is_embed=mask)


def _refuse_unknown(members: Section, allowed: tuple[str, ...]) -> None:
    for key in members.values:
        if key not in allowed:
            reason = f"{members.name(key)} is not supported; allowed are {', '.join(allowed)}"
            raise InvalidRequest(reason)


def read_routing_hashes(extra_args: object) -> list[str] | None:
    """What the router calls the images of a request, one text each; None if it says nothing."""
    if not isinstance(extra_args, Mapping) or ROUTING_HASHES not in extra_args:
        return None
    hashes = extra_args[ROUTING_HASHES]
    if not isinstance(hashes, list):
        reason = f"extra_args.{ROUTING_HASHES} must be an array of strings, got {describe(hashes)}"
        raise InvalidRequest(reason)
    for position, value in enumerate(hashes):
        if not isinstance(value, str) or not value:
            reason = f"extra_args.{ROUTING_HASHES}[{position}] must be a non-empty string, got {describe(value)}"
            raise InvalidRequest(reason)
    return hashes


def _checked_marker(routing_hashes: list[str], position: int, identity: str) -> str:
    marker = routing_hashes[position]
    if marker != routing_hash(identity):
        reason = f"extra_args.{ROUTING_HASHES}[{position}] does not match the payload of the image"
        raise InvalidRequest(reason)
    return marker


def _decode(encoded: str, where: str) -> bytes:
    """Standard base64 with padding, in its one canonical form."""
    try:
        payload = binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:
        reason = f"{where} must be base64 with padding: {error}"
        raise InvalidRequest(reason) from None
    last = payload[-(len(payload) % 3 or 3) :]
    if not payload or binascii.b2a_base64(last, newline=False).decode() != encoded[-4:]:
        reason = f"{where} must be base64 with padding: there are stray bits at the end"
        raise InvalidRequest(reason)
    return payload


def _too_large(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path}.kwargs_data exceeds the limit of {MAX_KWARGS_BYTES} decoded bytes per request")
