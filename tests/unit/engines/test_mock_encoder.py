"""The encode role of the mock engine, and what other mocks make of its result."""

from __future__ import annotations

from typing import Any

import pytest

from support.mock_engine import answers_to, job_of, mock_settings, outputs_of, request_of
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.engines.mock_encoder import encoded_items, encoder_result
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    FinishInfoFinishReason,
    GenerateRequest,
    KvCacheParameters,
    MediaItem,
    Modality,
    PreprocessedMediaFeatures,
    Struct,
    Value,
)

IMAGE = MediaItem(modality=Modality.IMAGE, data_uri="data:image/png;base64,AAAA", uuid="image-a")
VIDEO = MediaItem(modality=Modality.VIDEO, url="https://example.com/v.mp4")
AUDIO = MediaItem(modality=Modality.AUDIO, url="https://example.com/a.wav")

ENCODE = mock_settings(disaggregation_mode=DisaggregationMode.ENCODE)
TAKES_MEDIA = mock_settings(multimodal=True)


def media_request(*media: MediaItem, result: Struct | None = None, **fields: Any) -> GenerateRequest:
    """A request with media, and perhaps what an encoder made of them."""
    kv = None if result is None else KvCacheParameters(ec_transfer_params=result)
    return request_of(media=list(media), kv=kv, **fields)


def refused(request: GenerateRequest, settings: Any) -> tuple[StatusCode, str]:
    """Status and message of the refusal."""
    with pytest.raises(RpcError) as caught:
        job_of(request, settings)
    return caught.value.status, caught.value.detail


@pytest.mark.rule("R8.34")
def test_an_encode_server_hands_over_one_item_for_each_medium_and_makes_no_token() -> None:
    """Its only output is the end, with a result that names every image and video in order."""
    answers = answers_to(media_request(IMAGE, VIDEO, request_id="request-1"), ENCODE)
    assert answers[0].prompt_info is not None
    (output,) = outputs_of(answers)
    finish = output.finish_info
    assert finish is not None
    assert finish.ec_transfer_params is not None
    assert (0, [], FinishInfoFinishReason.STOP) == (output.num_tokens, output.token_ids, finish.finish_reason)
    assert finish.kv_transfer_params is None
    result = json_from_struct(finish.ec_transfer_params, label="result")
    items = result["ec_items"]
    assert isinstance(items, list)
    keys = [item["key"] for item in items if isinstance(item, dict)]
    assert ("request-1", "image-a", 2) == (result["request_id"], keys[0], len(keys))
    assert isinstance(keys[1], str)
    assert keys[1]


def test_what_is_encoded_has_the_same_name_every_time() -> None:
    """An item without a uuid is named by its content, prepared features by their identifier."""
    prepared = MediaItem(modality=Modality.IMAGE, features=PreprocessedMediaFeatures(identifier="identity"))
    other = MediaItem(modality=Modality.VIDEO, url="https://example.com/w.mp4")
    assert encoded_items([VIDEO]) == encoded_items([VIDEO])
    assert encoded_items([VIDEO]) != encoded_items([other])
    assert (("IMAGE", "identity"),) == encoded_items([prepared])


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (media_request(), StatusCode.FAILED_PRECONDITION, "images or videos"),
        (media_request(IMAGE, AUDIO), StatusCode.INVALID_ARGUMENT, "an encode server takes images and videos"),
        (
            media_request(IMAGE, result=encoder_result(encoded_items([IMAGE]), "r")),
            StatusCode.INVALID_ARGUMENT,
            "kv.ec_transfer_params",
        ),
    ],
)
def test_an_encode_server_refuses_what_it_cannot_encode(request_: Any, status: StatusCode, words: str) -> None:
    """No media, other media, and what was encoded already."""
    code, message = refused(request_, ENCODE)
    assert status is code
    assert words in message


def test_an_encode_server_takes_no_part_in_prefill() -> None:
    """A prefill request has come to the wrong server."""
    kv = KvCacheParameters(kv_transfer_params=Struct(fields={"do_remote_decode": Value(bool_value=True)}))
    code, message = refused(request_of(media=[IMAGE], kv=kv), ENCODE)
    assert StatusCode.FAILED_PRECONDITION is code
    assert "an encode server takes no prefill" in message


def test_another_mock_takes_the_result_of_these_media_only() -> None:
    """A result that is whole passes; one for other media, or that no mock has made, does not."""
    sound = encoder_result(encoded_items([IMAGE, VIDEO]), "r")
    job = job_of(media_request(IMAGE, VIDEO, result=sound), TAKES_MEDIA)
    assert () == job.encoded
    for media, result, words in [
        ((VIDEO, IMAGE), sound, "for 2 other media than the request's 2"),
        ((IMAGE,), sound, "for 2 other media than the request's 1"),
        ((IMAGE,), Struct(fields={"ec_items": Value(string_value="x")}), "mocker_encoder is missing"),
    ]:
        code, message = refused(media_request(*media, result=result), TAKES_MEDIA)
        assert StatusCode.INVALID_ARGUMENT is code
        assert words in message


def test_media_have_to_be_wanted() -> None:
    """Without --multimodal neither media nor results are taken; an encode server says that it takes media anyway."""
    plain = mock_settings()
    assert "media is not supported" in refused(media_request(IMAGE), plain)[1]
    assert "kv.ec_transfer_params" in refused(media_request(result=encoder_result([], "r")), plain)[1]
    said = [MockFacts.resolve(each).model_info().supports_multimodal for each in (plain, TAKES_MEDIA, ENCODE)]
    assert [False, True, True] == said
