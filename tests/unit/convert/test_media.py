from __future__ import annotations

import copy
from typing import Any

import pytest

from support.conversion import refused, shown, wire
from support.samples import IMAGES, features, media_request, minimal_request, model_facts, multimodal_facts
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.wire import MediaItem, Modality

FACTS = multimodal_facts()
HASH = "0123456789abcdef"
IMAGE_URL = [{"Url": url} for url in IMAGES]


def media(data: Any, **top: Any) -> list[MediaItem]:
    """The media items that go out."""
    return wire(minimal_request(multi_modal_data=data, **top), FACTS).media


def uuids(**top: Any) -> list[str]:
    """The identities of the two images."""
    return [item.uuid for item in wire(media_request(**top), FACTS).media]


@pytest.mark.rule("R7.39", "R7.40", "R7.42")
@pytest.mark.parametrize(
    ("key", "modality"), [("image_url", Modality.IMAGE), ("video_url", Modality.VIDEO), ("audio_url", Modality.AUDIO)]
)
@pytest.mark.parametrize("variant", ["Url", "RawUrl"])
@pytest.mark.parametrize(
    ("source", "field"),
    [("data:image/png;base64,AAAA", "data_uri"), ("http://host/a", "url"), ("https://host/a?b=c", "url")],
)
def test_a_link_goes_out_as_it_is(key: str, modality: Modality, variant: str, source: str, field: str) -> None:
    """Each kind of media and of address has its own place on the wire; the type is left to the engine."""
    expected = MediaItem(modality=modality)
    setattr(expected, field, source)
    assert [expected] == media({key: [{variant: source}]})


@pytest.mark.rule("R7.39")
def test_all_items_keep_their_order() -> None:
    """Items go out in the order of the request, and keys without items are skipped."""
    data = {"video_url": [{"Url": "data:,v"}], "audio_url": [], "unknown": [], "none": None, "image_url": IMAGE_URL}
    sent = [(item.modality, item.data_uri or item.url) for item in media(data)]
    assert [(Modality.VIDEO, "data:,v"), (Modality.IMAGE, IMAGES[0]), (Modality.IMAGE, IMAGES[1])] == sent


@pytest.mark.rule("R7.39", "R7.40", "R7.41")
@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            {"depth_url": [{"Url": "data:,a"}]},
            "multi_modal_data.depth_url is not supported by vLLM gRPC; allowed are image_url, video_url, audio_url",
        ),
        ({"image_url": [{"Url": "file:///a"}]}, "image_url[0] must be an http://, https:// or data: URI, got file:"),
        ({"video_url": [{"RawUrl": "/a/b"}]}, "video_url[0] must be an http://, https:// or data: URI, got no scheme"),
        ({"image_url": [{"Url": "HTTP://host"}]}, "got HTTP:"),
        ({"image_url": [{"Url": "ftp:a:b"}]}, "got ftp:"),
        ({"image_url": [{"Url": "secret"}]}, "got no scheme"),
        ({"image_url": [{"Url": "a/b:c"}]}, "got no scheme"),
        ({"image_url": [{"Url": ""}]}, "multi_modal_data.image_url[0] must be an http"),
        ({"image_url": [{"Url": "data:,a"}, {"Url": "ftp:x"}]}, "image_url[1] must be"),
        (
            {"image_url": [{"Decoded": {"nixl_metadata": "x"}}]},
            "decoded media; configure the front end for URL passthr",
        ),
        ({"image_url": [{"UuidOnly": "image-a"}]}, "image_url[0] holds a UUID only"),
        ({"image_url": [{"Url": "data:,\ud800"}]}, "image_url[0] must be valid Unicode"),
        ({"image_url": ["data:,a"]}, "image_url[0] must be an object with one member out of Url, RawUrl, got the text"),
        ({"image_url": [{"Url": 1}]}, "image_url[0] must be an object with one member"),
        ({"image_url": [{"Url": "data:,a", "RawUrl": "data:,a"}]}, "must be an object with one member"),
        ({"image_url": [{"Other": "data:,a"}]}, "must be an object with one member"),
        ({"image_url": [None]}, "must be an object with one member out of Url, RawUrl, got null"),
        ({"image_url": {"Url": "data:,a"}}, "multi_modal_data.image_url must be an array, got an object"),
        ([], "multi_modal_data must be a JSON object, got an array"),
    ],
    ids=shown,
)
def test_what_the_engine_could_not_fetch_is_refused(data: Any, named: str) -> None:
    """Media that are no link or data URI are refused, and the item is named."""
    assert named in refused(minimal_request(multi_modal_data=data), FACTS)


def test_an_address_is_not_shown() -> None:
    """An address may be private, so a message shows no more than its scheme."""
    message = refused(minimal_request(multi_modal_data={"image_url": [{"Url": "file:///secret"}]}), FACTS)
    assert "secret" not in message


@pytest.mark.rule("R7.43")
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, ["", ""]),
        ({}, ["", ""]),
        ({"image_url": None}, ["", ""]),
        ({"image_url": ["image-a", "image-b"]}, ["image-a", "image-b"]),
        ({"image_url": [None, ""]}, ["", ""]),
        ({"image_url": [None, "image-b"]}, ["", "image-b"]),
        ({"image_url": ["..a", "a..b"]}, ["..a", "a..b"]),
        ({"image_url": ["X-ray", "b.png"]}, ["X-ray", "b.png"]),
        ({"image_url": ["a", "b"], "video_url": [None, ""]}, ["a", "b"]),
    ],
    ids=shown,
)
def test_the_users_identities_go_out(given: Any, sent: list[str]) -> None:
    """Each image has the user's identity for it, or none."""
    assert sent == uuids(multi_modal_uuids=given)


@pytest.mark.rule("R7.43", "R7.44", "R7.45", "7.5")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"image_url": ["a"]}, "multi_modal_uuids.image_url must have one entry per media item, got 1 for 2"),
        ({"image_url": []}, "multi_modal_uuids.image_url must have one entry per media item, got 0 for 2"),
        ({"image_url": ["a", "b", "c"]}, "got 3 for 2"),
        ({"video_url": ["a"]}, "multi_modal_uuids.video_url must be empty or hold nulls only"),
        ({"audio_url": [None, "a"]}, "multi_modal_uuids.audio_url must be empty or hold nulls only"),
        ({"image_url": ["a", 1]}, "multi_modal_uuids.image_url[1] must be a string or null, got 1"),
        ({"image_url": "ab"}, "multi_modal_uuids.image_url must be an array"),
        ({"image_url": ["a", "\ud800"]}, "multi_modal_uuids.image_url[1] must be valid Unicode"),
        *(
            ({"image_url": ["a", unsafe]}, f"without path separators, NUL and dot components, got the text {unsafe!r}")
            for unsafe in ("/tmp/escape", "../escape", "nested/item", "nested\\item", ".", "..", "nul\0item")
        ),
    ],
    ids=shown,
)
def test_refused_identities(given: Any, named: str) -> None:
    """An identity that fits no item, or that could be taken for a path, is refused."""
    assert named in refused(media_request(multi_modal_uuids=given), FACTS)


@pytest.mark.rule("R7.43", "R7.44")
def test_identities_of_other_media() -> None:
    """Nulls are allowed for videos, as many as there are; identities of images need images."""
    video = {"video_url": [{"Url": "data:,v"}]}
    assert [""] == [item.uuid for item in media(video, multi_modal_uuids={"video_url": [None]})]
    request = minimal_request(multi_modal_data=video, multi_modal_uuids={"video_url": [None, ""]})
    assert "multi_modal_uuids.video_url must have one entry per media item, got 2 for 1" in refused(request, FACTS)
    request = minimal_request(multi_modal_data=video, multi_modal_uuids={"image_url": ["a"]})
    assert "multi_modal_uuids.image_url must have one entry per media item, got 1 for 0" in refused(request, FACTS)


@pytest.mark.rule("R7.46", "R7.47", "R7.48")
@pytest.mark.parametrize(
    ("hashes", "given", "sent"),
    [
        ([HASH, "f" * 64], None, [HASH + "0" * 48, "f" * 64]),
        (["a", "f" * 65], None, ["a" + "0" * 63, "f" * 65]),
        (["é", "not hex"], None, ["é".ljust(64, "0"), "not hex".ljust(64, "0")]),
        ([HASH, HASH], {"image_url": [None, ""]}, [HASH + "0" * 48] * 2),
        ([HASH, HASH], {"image_url": ["a", None]}, ["a", ""]),
        ([HASH, HASH], {"image_url": [None, "b"]}, ["", "b"]),
        ([HASH], {"image_url": ["a", "b"]}, ["a", "b"]),
        ([], None, ["", ""]),
    ],
    ids=shown,
)
def test_the_routers_hashes_are_identities(hashes: list[str], given: Any, sent: list[str]) -> None:
    """The router's hashes identify the images, padded to full length, unless the user identifies any of them."""
    assert sent == uuids(extra_args={"mm_hashes": hashes}, multi_modal_uuids=given)


@pytest.mark.rule("R7.46")
def test_hashes_are_for_images_only() -> None:
    """Videos get no hash, and without images the list is not looked at."""
    data = {"image_url": [{"Url": "data:,i"}], "video_url": [{"Url": "data:,v"}]}
    assert [HASH + "0" * 48, ""] == [item.uuid for item in media(data, extra_args={"mm_hashes": [HASH]})]
    video = {"video_url": [{"Url": "data:,v"}]}
    assert [""] == [item.uuid for item in media(video, extra_args={"mm_hashes": "x"})]


@pytest.mark.rule("R7.45", "R7.47")
@pytest.mark.parametrize(
    ("hashes", "named"),
    [
        ("x", "extra_args.mm_hashes must be an array of strings, got the text 'x'"),
        (None, "extra_args.mm_hashes must be an array of strings, got null"),
        ([HASH, ""], "extra_args.mm_hashes[1] must be a non-empty string"),
        ([1, HASH], "extra_args.mm_hashes[0] must be a non-empty string, got 1"),
        ([HASH], "extra_args.mm_hashes must have one entry per media item, got 1 for 2"),
        ([HASH] * 3, "extra_args.mm_hashes must have one entry per media item, got 3 for 2"),
        ([HASH, "a/b"], "safe identifier"),
        ([HASH, "\ud800"], "extra_args.mm_hashes[1] must be valid Unicode"),
    ],
    ids=shown,
)
def test_refused_hashes(hashes: Any, named: str) -> None:
    """A list of hashes that fits no list of images is refused."""
    assert named in refused(media_request(extra_args={"mm_hashes": hashes}), FACTS)


@pytest.mark.rule("R7.23")
@pytest.mark.parametrize("prepared", [False, True], ids=["raw", "prepared"])
def test_what_media_say_themselves_is_dropped(prepared: bool) -> None:
    """The front end's own copies of the prompt leave no trace in a request with media."""
    extra = {"vllm_tito": {"sampling_params": {}, "features": features()}} if prepared else {}
    data = None if prepared else {"image_url": IMAGE_URL}
    redundant = {"messages": [{"role": "user"}], "formatted_prompt": "x"}
    plain, full = (
        wire(minimal_request(multi_modal_data=data, extra_args=args), FACTS) for args in (extra, {**extra, **redundant})
    )
    assert plain == full
    message = refused(minimal_request(multi_modal_data=data, extra_args={**extra, "unknown": 1}), FACTS)
    assert "extra_args.unknown is not supported" in message


@pytest.mark.rule("R7.49")
@pytest.mark.parametrize("mode", list(DisaggregationMode), ids=lambda mode: mode.value)
def test_a_text_model_takes_no_media(mode: DisaggregationMode) -> None:
    """Media on a text model are refused as such, whatever else is wrong; empty lists are no media."""
    facts = model_facts(mode=mode)
    assert "'served-model' does not advertise multimodal support" in refused(media_request(token_ids=[]), facts)
    if mode is DisaggregationMode.AGGREGATED:
        assert [] == wire(minimal_request(multi_modal_data={"image_url": []}), facts).media


def test_conversion_leaves_the_request_alone() -> None:
    """The caller's dict is as before."""
    request = media_request(extra_args={"mm_hashes": [HASH, HASH]})
    before = copy.deepcopy(request)
    assert wire(request, FACTS) == wire(request, FACTS)
    assert before == request
