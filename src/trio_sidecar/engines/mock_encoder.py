"""Make-believe encoding of images and videos: an encode mock hands over what another mock, and only a mock, takes."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn

from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import ListValue, Modality, Struct, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_sidecar.wire import MediaItem

__all__ = ["check_encoder_result", "check_media_to_encode", "encoded_items", "encoder_result"]

PARAMS = "kv.ec_transfer_params"
SENTINEL = "mocker_encoder"
"""Proves that the result came from an encode mock."""

ROWS = 16
COLUMNS = 2048
"""Shape of one encoded item: rows are what it would take in the prompt."""

EncodedItem = tuple[str, str]
"""Modality and key of one item."""


def check_media_to_encode(media: Sequence[MediaItem]) -> None:
    """Check that there is something to encode, and nothing else.

    Raises:
        RpcError: FAILED_PRECONDITION without media, INVALID_ARGUMENT for what is neither image nor video.
    """
    if not media:
        raise RpcError(StatusCode.FAILED_PRECONDITION, "an encode server needs media: images or videos")
    for item in media:
        if item.modality not in (Modality.IMAGE, Modality.VIDEO):
            _invalid(f"media has the modality {item.modality!r}; an encode server takes images and videos")


def encoded_items(media: Sequence[MediaItem]) -> tuple[EncodedItem, ...]:
    """What each item is called: by its uuid if the caller gave one, else by its content."""
    return tuple((Modality(item.modality).name or "", item.uuid or _digest(item)) for item in media)


def encoder_result(items: Sequence[EncodedItem], request_id: str) -> Struct:
    """What an encode mock sends along."""
    values = [
        Value(
            struct_value=Struct(
                fields={
                    "modality": Value(string_value=modality.lower()),
                    "key": Value(string_value=key),
                    "shape": Value(list_value=ListValue(values=[_number(1), _number(ROWS), _number(COLUMNS)])),
                }
            )
        )
        for modality, key in items
    ]
    return Struct(
        fields={
            SENTINEL: Value(bool_value=True),
            "request_id": Value(string_value=request_id),
            "ec_items": Value(list_value=ListValue(values=values)),
        }
    )


def check_encoder_result(result: Struct, media: Sequence[MediaItem]) -> None:
    """Check that an encode mock has encoded these media.

    Raises:
        RpcError: INVALID_ARGUMENT if it has not, or if the result has lost something on its way.
    """
    fields = result.fields
    if SENTINEL not in fields or fields[SENTINEL].bool_value is not True:
        _invalid(f"{PARAMS}.{SENTINEL} is missing; the mock engine takes only what an encode mock has made")
    items = fields["ec_items"].list_value if "ec_items" in fields else None
    if items is None:
        _invalid(f"{PARAMS}.ec_items must be a list")
    have = [_key(value) for value in items.values]
    want = [key for _, key in encoded_items(media)]
    if have != want:
        _invalid(f"{PARAMS}.ec_items is for {len(have)} other media than the request's {len(want)}")


def _key(value: Value) -> str | None:
    fields = {} if value.struct_value is None else value.struct_value.fields
    return fields["key"].string_value if "key" in fields else None


def _digest(item: MediaItem) -> str:
    source = item.url or item.data_uri or item.raw_bytes
    if source is None and item.features is not None:
        return item.features.identifier
    data = source.encode() if isinstance(source, str) else source or b""
    return blake2b(data, digest_size=8).hexdigest()


def _number(value: int) -> Value:
    return Value(number_value=float(value))


def _invalid(reason: str) -> NoReturn:
    raise RpcError(StatusCode.INVALID_ARGUMENT, reason)
