from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversion import refused, wire
from support.samples import (
    KWARGS,
    OTHER_KWARGS,
    features,
    features_request,
    media_request,
    minimal_request,
    model_facts,
    multimodal_facts,
)
from trio_sidecar.convert.features import MAX_KWARGS_BYTES, content_hash, routing_hash
from trio_sidecar.wire import MediaItem, Modality, PreprocessedMediaFeatures
from trio_sidecar.wire.codec import decode, encode

IDENTITY = "grpc-mm:eb917f9e320304a5c5fc538e0de431ccc7237ba302a2aa8b6f0dd39bde78509f"
OTHER_IDENTITY = "grpc-mm:4e46fb83213f0fa059280d06aca9af888745bf5d7f7794d91996eb6742b842bc"
SHORTEST_IDENTITY = "grpc-mm:835d2213e413e78e540c88905d36dfa708aa0eb02e9d546026a832c6f5ac5825"
MARKER = "0a6e5e38d1e6fe68" + "0" * 48
OTHER_MARKER = "404bf7c5701f34da" + "0" * 48
TOO_LARGE = "features.kwargs_data exceeds the limit of 16777216 decoded bytes"


def sent(prepared: Any = None, **request: Any) -> list[PreprocessedMediaFeatures]:
    """The features that go out."""
    items = wire(features_request(prepared, **request), model_facts()).media
    return [item.features for item in items if item.features is not None]


def images(*kwargs: str, **changes: Any) -> dict[str, Any]:
    """Prepared images, one token each."""
    return features(
        mm_hashes={"image": ["h"] * len(kwargs)},
        mm_placeholders={"image": [{"offset": at, "length": 1} for at in range(len(kwargs))]},
        kwargs_data={"image": list(kwargs)},
        **changes,
    )


def one(modality: str = "image", **placeholder: Any) -> dict[str, Any]:
    """One prepared item of another kind, or at another place."""
    return {
        "mm_hashes": {modality: ["h"]},
        "mm_placeholders": {modality: [{"offset": 1, "length": 2, **placeholder}]},
        "kwargs_data": {modality: [KWARGS]},
    }


@pytest.mark.rule("R7.51", "R7.52", "R7.53")
def test_a_prepared_image_goes_out_whole() -> None:
    """Place and payload are copied, the identity is made from the payload, and the rest stays empty."""
    expected = PreprocessedMediaFeatures(
        kwargs=base64.b64decode(KWARGS), identifier=IDENTITY, offset=1, length=2, mm_hash=IDENTITY, is_embed=[]
    )
    assert [MediaItem(modality=Modality.IMAGE, features=expected)] == wire(features_request()).media


@pytest.mark.rule("R7.52")
@pytest.mark.parametrize(
    ("payload", "identity"),
    [
        (b"\x80", SHORTEST_IDENTITY),
        (base64.b64decode(KWARGS), IDENTITY),
        (base64.b64decode(OTHER_KWARGS), OTHER_IDENTITY),
    ],
    ids=["one byte", "tensor", "other tensor"],
)
def test_identities_are_exactly_these(payload: bytes, identity: str) -> None:
    """The content's identity is the digest that router and engine compute as well."""
    assert identity == content_hash("image", payload)


@pytest.mark.rule("R7.52")
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_identities_depend_on_every_byte_and_on_the_modality(first: bytes, second: bytes) -> None:
    """Different content, or the same content of another kind, never has the same identity."""
    assert (first == second) is (content_hash("image", first) == content_hash("image", second))
    assert content_hash("image", first) != content_hash("video", first)
    assert content_hash("a", b"b" + first) != content_hash("ab", first)


@pytest.mark.rule("R7.51", "R7.52")
@given(st.binary(min_size=1, max_size=200), st.integers(0, 199), st.integers(0, 7))
def test_payloads_reach_the_wire_bit_by_bit(payload: bytes, position: int, bit: int) -> None:
    """The payload arrives unchanged through the wire, and one flipped bit is another item."""
    flipped = bytearray(payload)
    flipped[position % len(payload)] ^= 1 << bit
    request = features_request(images(*(base64.b64encode(each).decode() for each in (payload, flipped))))
    items = decode(type(message := wire(request)), encode(message)).media
    first, second = (item.features for item in items)
    assert first is not None
    assert second is not None
    assert (payload, bytes(flipped)) == (first.kwargs, second.kwargs)
    assert first.mm_hash != second.mm_hash


@pytest.mark.rule("R7.52")
def test_the_producers_hash_does_not_matter() -> None:
    """Two names for one content are one identity; one name for two contents is two."""
    assert sent() == sent(features(mm_hashes={"image": ["another-name"]}))
    assert [OTHER_IDENTITY] == [each.mm_hash for each in sent(features(kwargs_data={"image": [OTHER_KWARGS]}))]


@pytest.mark.rule("R7.53", "R7.60")
@pytest.mark.parametrize(
    ("lora_name", "identifier"),
    [
        ("adapter-a", f"adapter-a:{IDENTITY}"),
        ("served-model", f"served-model:{IDENTITY}"),
        ("", IDENTITY),
        (None, IDENTITY),
    ],
)
def test_an_adapters_items_are_its_own(lora_name: str | None, identifier: str) -> None:
    """The adapter that the router saw scopes the identifier, even a base name; the content's identity is unscoped."""
    (only,) = sent(routing={"lora_name": lora_name})
    assert (identifier, IDENTITY) == (only.identifier, only.mm_hash)


@pytest.mark.rule("R7.54")
@pytest.mark.parametrize(
    ("identity", "marker"),
    [
        (IDENTITY, MARKER),
        (OTHER_IDENTITY, OTHER_MARKER),
        (SHORTEST_IDENTITY, "5605b2fad3a8c66e" + "0" * 48),
    ],
)
def test_routing_hashes_are_exactly_these(identity: str, marker: str) -> None:
    """The router's name for an identity is sixteen digits of its hash, filled up with zeros."""
    assert marker == routing_hash(identity)


@pytest.mark.rule("R7.54")
def test_the_routers_name_is_the_identifier() -> None:
    """A matching name of the router identifies an image; under an adapter the adapter's form wins."""
    extra = {"dynamo_mm_routing_hashes": [MARKER]}
    (only,) = sent(extra=extra)
    assert (MARKER, IDENTITY) == (only.identifier, only.mm_hash)
    (only,) = sent(extra=extra, routing={"lora_name": "adapter-a"})
    assert f"adapter-a:{IDENTITY}" == only.identifier


@pytest.mark.rule("R7.54")
def test_routing_hashes_are_for_images_only() -> None:
    """With images among other media, each image has its own router name, and the others none."""
    prepared = {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 0, "length": 1}, {"offset": 1, "length": 1}],
            "audio": [{"offset": 2, "length": 1}],
        },
        "kwargs_data": {"image": [KWARGS, OTHER_KWARGS], "audio": [KWARGS]},
    }
    items = sent(prepared, extra={"dynamo_mm_routing_hashes": [MARKER, OTHER_MARKER]})
    audio = content_hash("audio", base64.b64decode(KWARGS))
    assert [audio, MARKER, OTHER_MARKER] == [each.identifier for each in items]


@pytest.mark.rule("R7.54", "R7.55")
@pytest.mark.parametrize(
    ("hashes", "named"),
    [
        ([OTHER_MARKER], "dynamo_mm_routing_hashes[0] does not match the payload of the image"),
        ([MARKER.upper()], "does not match"),
        ([IDENTITY], "does not match"),
        ([], "dynamo_mm_routing_hashes must have one entry per image, got 0 for 1"),
        ([MARKER, MARKER], "dynamo_mm_routing_hashes must have one entry per image, got 2 for 1"),
        ([""], "dynamo_mm_routing_hashes[0] must be a non-empty string"),
        ([MARKER, 1], "dynamo_mm_routing_hashes[1] must be a non-empty string, got 1"),
        (MARKER, "dynamo_mm_routing_hashes must be an array of strings, got a text of 64 characters"),
        (None, "dynamo_mm_routing_hashes must be an array of strings, got null"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("lora_name", [None, "adapter-a"])
def test_refused_routing_hashes(hashes: Any, named: str, lora_name: str | None) -> None:
    """A name of the router that is not that of the payload is refused, also where the adapter's would win."""
    request = features_request(extra={"dynamo_mm_routing_hashes": hashes}, routing={"lora_name": lora_name})
    assert named in refused(request)


@pytest.mark.rule("R7.55")
def test_routing_hashes_need_features() -> None:
    """In a request without prepared media the router's names belong to nothing."""
    extra = {"dynamo_mm_routing_hashes": [MARKER]}
    assert "requires preprocessed multimodal features" in refused(minimal_request(extra_args=extra))
    assert "requires preprocessed" in refused(media_request(extra_args=extra), multimodal_facts())


@pytest.mark.rule("R7.56")
def test_raw_and_prepared_media_do_not_mix() -> None:
    """A request has media of one sort only."""
    envelope = {"sampling_params": {}, "features": features()}
    message = refused(media_request(extra_args={"vllm_tito": envelope}), multimodal_facts())
    assert "multi_modal_data and extra_args.vllm_tito.features cannot be mixed in one request" in message


@pytest.mark.rule("R7.57", "R7.51")
@pytest.mark.parametrize(
    ("mask", "expected"),
    [([False, True, False], [False, True, False]), ([], []), (None, [])],
    ids=str,
)
def test_a_sparse_item_keeps_its_mask(mask: Any, expected: list[bool]) -> None:
    """The mask goes out as it is; without one the item is dense."""
    (only,) = sent(one(offset=0, length=3, is_embed=mask))
    assert expected == only.is_embed


@pytest.mark.rule("R7.59")
def test_modalities_go_out_in_the_order_of_their_names() -> None:
    """Whatever the order of the request, audio comes before images and these before videos."""
    prepared: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for at, modality in enumerate(("video", "image", "audio")):
        prepared["mm_hashes"][modality] = ["h"]
        prepared["mm_placeholders"][modality] = [{"offset": at, "length": 1}]
        prepared["kwargs_data"][modality] = [KWARGS]
    items = wire(features_request(prepared)).media
    assert [Modality.AUDIO, Modality.IMAGE, Modality.VIDEO] == [item.modality for item in items]
    assert [2, 1, 0] == [item.features.offset for item in items if item.features]


@pytest.mark.rule("7.12")
@pytest.mark.parametrize(
    ("prepared", "named"),
    [
        ([], "features must be a JSON object, got an array"),
        (features(kwargs_data=None), "features.kwargs_data is required"),
        (features(mm_hashes=None), "features.mm_hashes is required"),
        (features(mm_placeholders=None), "features.mm_placeholders is required"),
        (features(unknown={}), "features.unknown is not supported; allowed are"),
        (features(mm_hashes=[]), "features.mm_hashes must be a JSON object"),
        (features(mm_hashes={}), "features.mm_hashes must not be empty"),
        (features(mm_hashes={}, mm_placeholders={}, kwargs_data={}), "features.mm_hashes must not be empty"),
        (features(mm_hashes={"image": ["h"], "video": []}), "modalities must match"),
        (features(mm_placeholders={"video": []}), "modalities must match"),
        (features(kwargs_data={}), "modalities must match"),
        (one("depth"), "'depth' is an unsupported preprocessed modality; allowed are audio, image, video"),
        (
            features(mm_hashes={"image": ["h", "i"]}),
            "modality image has mismatched item counts [2, 1, 1] (mm_hashes, mm_placeholders, kwargs_data)",
        ),
        (features(kwargs_data={"image": []}), "mismatched item counts [1, 1, 0]"),
        (features(mm_hashes={"image": [""]}), "mm_hashes.image[0] is an empty hash"),
        (features(mm_hashes={"image": [1]}), "mm_hashes.image[0] must be a string, got 1"),
        (features(mm_hashes={"image": None}), "mm_hashes.image must be an array, got null"),
        (features(mm_placeholders={"image": {}}), "mm_placeholders.image must be an array"),
        (features(mm_placeholders={"image": [1]}), "mm_placeholders.image[0] must be a JSON object, got 1"),
        (features(mm_placeholders={"image": [{"length": 1}]}), "mm_placeholders.image[0].offset is required"),
        (features(mm_placeholders={"image": [{"offset": 1}]}), "mm_placeholders.image[0].length is required"),
        (one(extra=1), "mm_placeholders.image[0].extra is not supported; allowed are offset, length, is_embed"),
        (one(length=0), "mm_placeholders.image[0] is an empty placeholder"),
        (one(length=-1), "length must be an integer from 0"),
        (one(offset=2**64), "offset must be an integer from 0"),
        (one(offset=2**64 - 1, length=1), "would overflow"),
        (one(offset=2**64 - 2, length=1), "exceeds the prompt"),
        (one(offset=2, length=2), "exceeds the prompt: offset 2, length 2, but 3 tokens"),
        (one(is_embed=[True]), "mm_placeholders.image[0].is_embed must be empty or have 2 entries, got 1"),
        (one(is_embed=[1, 0]), "is_embed must be an array of booleans"),
        (one(is_embed="x"), "is_embed must be an array of booleans"),
        (images(""), "kwargs_data.image[0] must not be empty"),
        (images("gA="), "kwargs_data.image[0] must be base64 with padding"),
        (images("gA"), "kwargs_data.image[0] must be base64"),
        (images("gA==", "gA==gA=="), "kwargs_data.image[1] must be base64"),
        (images("gB=="), "kwargs_data.image[0] must be base64 with padding: there are stray bits"),
        (images("gA==\n"), "must be base64"),
        (images("-_8="), "must be base64"),
        (images("===="), "must be base64"),
        (images("é"), "must be base64"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_refused_features(prepared: Any, named: str) -> None:
    """Prepared media that contradict themselves or the prompt are refused, and the place is named."""
    assert named in refused(features_request(prepared))


@pytest.mark.rule("7.12")
@pytest.mark.parametrize("placeholder", [{"offset": 0, "length": 3}, {"offset": 2, "length": 1}], ids=str)
def test_a_place_may_touch_the_end(placeholder: dict[str, Any]) -> None:
    """An item may take the prompt's last token."""
    assert 1 == len(sent(one(**placeholder)))


@pytest.mark.rule("7.12")
@pytest.mark.parametrize("metadata", [None, {}, "x"], ids=str)
def test_metadata_is_ignored(metadata: Any) -> None:
    """What the producer notes for itself changes nothing."""
    assert sent() == sent({**features(), "mm_metadata": metadata})


@pytest.mark.rule("7.12", "R7.58")
def test_the_limit_holds_for_all_items_together() -> None:
    """Payloads of exactly the limit pass, however they are split; one byte more is refused."""
    whole = base64.b64encode(bytes(MAX_KWARGS_BYTES)).decode()
    half, more = (base64.b64encode(bytes(MAX_KWARGS_BYTES // 2 + extra)).decode() for extra in (0, 1))
    assert 1 == len(sent(images(whole)))
    assert 2 == len(sent(images(half, half)))
    assert TOO_LARGE in refused(features_request(images(half, more)))
    assert TOO_LARGE in refused(features_request(images(whole, "gA==")))
    across = {
        "mm_hashes": {"image": ["h"], "audio": ["h"]},
        "mm_placeholders": {name: [{"offset": 0, "length": 1}] for name in ("image", "audio")},
        "kwargs_data": {"image": [half], "audio": [more]},
    }
    assert TOO_LARGE in refused(features_request(across))


@pytest.mark.rule("R7.58")
@pytest.mark.parametrize(("chars", "named"), [(22369628, "must be base64"), (22369629, TOO_LARGE)])
def test_a_text_that_cannot_fit_is_not_decoded(chars: int, named: str) -> None:
    """A text whose content must exceed the limit is refused by its length, whatever it holds."""
    assert named in refused(features_request(images("!" * chars)))


@pytest.mark.rule("R7.58")
@pytest.mark.parametrize(("chars", "named"), [(22369624, "must be base64"), (22369625, TOO_LARGE)])
def test_what_came_before_counts_for_a_text_that_cannot_fit(chars: int, named: str) -> None:
    """The same limit less the one byte of the item before it."""
    assert named in refused(features_request(images("gA==", "!" * chars)))


def test_conversion_leaves_the_request_alone() -> None:
    """The caller's dict is as before."""
    request = features_request(extra={"dynamo_mm_routing_hashes": [MARKER]})
    before = copy.deepcopy(request)
    assert wire(request) == wire(request)
    assert before == request
