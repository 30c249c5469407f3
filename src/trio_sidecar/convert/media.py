"""Raw media: links and data URIs that the engine fetches and prepares itself (spec 7.11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trio_sidecar.convert.fields import check_text, describe
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import MediaItem, Modality

if TYPE_CHECKING:
    from trio_sidecar.convert.fields import Section

__all__ = ["MODALITIES", "RawMedia", "check_uuid_keys", "raw_media", "raw_media_items"]

MODALITIES: Mapping[str, Modality] = {
    "audio": Modality.AUDIO,
    "image": Modality.IMAGE,
    "video": Modality.VIDEO,
}

_IMAGES = "image_url"
_KEYS = {_IMAGES: Modality.IMAGE, "video_url": Modality.VIDEO, "audio_url": Modality.AUDIO}
_DATA = "multi_modal_data"
_UUIDS = "multi_modal_uuids"
_HASHES = "mm_hashes"

_URL_VARIANTS = ("Url", "RawUrl")

_HASH_CHARS = 64
"""Length of an engine's own content hash; a shorter one from the router is padded to it (R7.46)."""

RawMedia = dict[str, list[object]]
"""The items of a request by their key, without empty lists."""


def raw_media(top: Section) -> RawMedia:
    """The raw media of a request, unchecked but for their containers."""
    data = top.section(_DATA)
    media: RawMedia = {}
    for key, items in data.values.items():
        if items is None:
            continue
        if not isinstance(items, list):
            raise data.refuse(key, "an array")
        if items:
            media[key] = items
    return media


def check_uuid_keys(top: Section, *, has_media: bool) -> None:
    """Refuse identities that nothing could carry: without any media, or for media that are no images (R7.44)."""
    uuids = top.section(_UUIDS)
    if any(uuids.values.values()) and not has_media:
        reason = f"{_UUIDS} must come with media, got some without {_DATA}"
        raise InvalidRequest(reason)
    for key in uuids.values:
        if key != _IMAGES and any(_uuid_list(uuids, key)):
            reason = (
                f"{uuids.name(key)} must be empty or hold nulls only: vLLM gRPC takes identities for {_IMAGES} only"
            )
            raise InvalidRequest(reason)


def raw_media_items(media: RawMedia, top: Section, extra_args: object) -> list[MediaItem]:
    """The wire's media items, in the order of the request.

    Args:
        media: The request's media.
        top: The request, for the user's identities.
        extra_args: Where the router's hashes are.

    Raises:
        InvalidRequest: An item is none that the engine could fetch, or the identities do not fit (R7.39 to R7.48).
    """
    uuids = top.section(_UUIDS)
    given = _uuid_list(uuids, _IMAGES)
    forwarded = _forwarded(extra_args) if media.get(_IMAGES) and not any(given) else []
    if given and _IMAGES not in media:
        raise _mismatch(uuids.name(_IMAGES), len(given), 0)
    items: list[MediaItem] = []
    for key, sources in media.items():
        modality = _KEYS.get(key)
        if modality is None:
            reason = f"{_DATA}.{key} is not supported by vLLM gRPC; allowed are {', '.join(_KEYS)}"
            raise InvalidRequest(reason)
        if uuids.get(key) is not None and len(_uuid_list(uuids, key)) != len(sources):
            raise _mismatch(uuids.name(key), len(_uuid_list(uuids, key)), len(sources))
        identities = [""] * len(sources)
        if modality is Modality.IMAGE:
            if forwarded and len(forwarded) != len(sources):
                raise _mismatch("extra_args." + _HASHES, len(forwarded), len(sources))
            identities = forwarded or given or identities
        for position, (source, identity) in enumerate(zip(sources, identities, strict=True)):
            items.append(_item(source, f"{_DATA}.{key}[{position}]", modality, identity))
    return items


def _item(source: object, name: str, modality: Modality, identity: str) -> MediaItem:
    text = _source_text(source, name)
    item = MediaItem(modality=modality, uuid=_safe(identity))
    if text.startswith("data:"):
        item.data_uri = text
    elif text.startswith(("http://", "https://")):
        item.url = text
    else:
        scheme, colon, _ = text.partition(":")
        # The address itself may be private.
        shown = f"{scheme}:" if colon and scheme.isalnum() else "no scheme"
        reason = f"{name} must be an http://, https:// or data: URI, got {shown}"
        raise InvalidRequest(reason)
    return item


def _source_text(source: object, name: str) -> str:
    """The address in one of Dynamo's media variants, an object with one member that is named after the variant."""
    if isinstance(source, Mapping) and len(source) == 1:
        ((variant, value),) = source.items()
        if variant in _URL_VARIANTS and isinstance(value, str):
            return check_text(value, name)
        if variant == "Decoded":
            reason = f"{name} holds decoded media; configure the front end for URL passthrough"
            raise InvalidRequest(reason)
        if variant == "UuidOnly":
            reason = f"{name} holds a UUID only, which the engine cannot resolve; media need an address"
            raise InvalidRequest(reason)
    reason = f"{name} must be an object with one member out of {', '.join(_URL_VARIANTS)}, got {describe(source)}"
    raise InvalidRequest(reason)


def _uuid_list(uuids: Section, key: str) -> list[str]:
    """The user's identities for one kind of media; "" where there is none."""
    values = uuids.get(key)
    if values is None:
        return []
    if not isinstance(values, list):
        raise uuids.refuse(key, "an array")
    texts: list[str] = []
    for position, value in enumerate(values):
        name = f"{uuids.name(key)}[{position}]"
        if value is not None and not isinstance(value, str):
            reason = f"{name} must be a string or null, got {describe(value)}"
            raise InvalidRequest(reason)
        texts.append(check_text(value or "", name))
    return texts


def _forwarded(extra_args: object) -> list[str]:
    """The router's content hashes, in the form of identities; empty if it sent none (R7.46, R7.47)."""
    hashes = extra_args.get(_HASHES, []) if isinstance(extra_args, Mapping) else []
    name = f"extra_args.{_HASHES}"
    if not isinstance(hashes, list):
        reason = f"{name} must be an array of strings, got {describe(hashes)}"
        raise InvalidRequest(reason)
    for position, value in enumerate(hashes):
        if not isinstance(value, str) or not value:
            reason = f"{name}[{position}] must be a non-empty string, got {describe(value)}"
            raise InvalidRequest(reason)
        check_text(value, f"{name}[{position}]")
    return [value.ljust(_HASH_CHARS, "0") for value in hashes]


def _safe(identity: str) -> str:
    """The same identity, if no engine could take it for a path (R7.45)."""
    if identity in (".", "..") or any(char in identity for char in "/\\\0"):
        reason = (
            f"{_UUIDS} must hold safe identifiers, without path separators, NUL and dot components, "
            f"got {describe(identity)}"
        )
        raise InvalidRequest(reason)
    return identity


def _mismatch(name: str, entries: int, items: int) -> InvalidRequest:
    return InvalidRequest(f"{name} must have one entry per media item, got {entries} for {items}")
