"""What the role of a worker does to a request (spec 7.10), beyond the payloads it hands over."""

from __future__ import annotations

from typing import Any

import pytest

from support.conversion import convert, dig, refused, wire
from support.samples import features_request, media_request, multimodal_facts
from trio_sidecar.config import DisaggregationMode

AGGREGATED, PREFILL, DECODE, ENCODE = (
    DisaggregationMode.AGGREGATED,
    DisaggregationMode.PREFILL,
    DisaggregationMode.DECODE,
    DisaggregationMode.ENCODE,
)
MODES = list(DisaggregationMode)
ONE_TOKEN = {PREFILL, ENCODE}

each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)


def request_for(**changes: Any) -> dict[str, Any]:
    """A request that every role accepts."""
    return media_request(**{"prefill_result": {"disaggregated_params": {}}, **changes})


@pytest.mark.rule("7.10", "FR-061")
@each_mode
def test_token_limits(mode: DisaggregationMode) -> None:
    """Prefill and encode ask for exactly one token, whatever the request says; the others for what it says."""
    for limits, asked in (({"max_tokens": 100, "min_tokens": 4}, (100, 4)), ({}, (0, 0))):
        stopping = dig(wire(request_for(stop=limits), multimodal_facts(mode=mode)), "stopping")
        expected = (1, 1) if mode in ONE_TOKEN else asked
        assert expected == (dig(stopping, "max_new_tokens"), dig(stopping, "min_new_tokens"))


@pytest.mark.rule("R7.4", "R7.5")
@each_mode
@pytest.mark.parametrize("sampling", [{"top_k": -1}, {"top_k": 0}, {"min_p": 0.0}], ids=str)
def test_switched_off_filters(mode: DisaggregationMode, sampling: dict[str, Any]) -> None:
    """Where sampling is the point, a filter cannot be switched off; the other roles send 0."""
    request, facts = request_for(sampling=sampling), multimodal_facts(mode=mode)
    ((name, _),) = sampling.items()
    if mode in ONE_TOKEN:
        assert 0 == dig(wire(request, facts), f"sampling.{name}")
    else:
        assert f"{name} must be" in refused(request, facts)


@pytest.mark.rule("R7.3")
@each_mode
def test_a_negative_top_k_is_refused_everywhere(mode: DisaggregationMode) -> None:
    """A top_k below -1 means nothing in any role."""
    assert "top_k must be an integer from -1" in refused(
        request_for(sampling={"top_k": -2}), multimodal_facts(mode=mode)
    )


@pytest.mark.rule("7.10", "R8.30")
@each_mode
@pytest.mark.parametrize("prepared", [False, True], ids=["raw", "prepared"])
@pytest.mark.parametrize("prompt_logprobs", [None, 0], ids=["plain", "scored"])
def test_prompt_ids_are_asked_for(mode: DisaggregationMode, prepared: bool, prompt_logprobs: int | None) -> None:
    """The prompt's ids come back where its logprobs are wanted, and to a prefill worker whenever there are media."""
    maker = features_request if prepared else media_request
    request = maker(prefill_result={"disaggregated_params": {}}, output={"prompt_logprobs": prompt_logprobs})
    options = dig(wire(request, multimodal_facts(mode=mode)), "response")
    assert (mode is PREFILL or prompt_logprobs is not None) is dig(options, "prompt_token_ids")
    assert (prompt_logprobs is not None) is dig(options, "prompt_logprobs")


@pytest.mark.rule("7.10")
def test_a_text_prefill_asks_for_no_prompt_ids() -> None:
    """Without media a prefill worker knows the prompt already."""
    request = request_for(multi_modal_data=None)
    assert not dig(wire(request, multimodal_facts(mode=PREFILL)), "response.prompt_token_ids")


@pytest.mark.rule("R7.70", "R7.71", "R7.72", "R7.73")
@each_mode
@pytest.mark.parametrize(
    "params", [{"return_token_ids": False}, {"logit_bias": {"42": 1.0}}, {"return_token_ids": 1}], ids=str
)
def test_sampling_keys_of_an_envelope(mode: DisaggregationMode, params: dict[str, Any]) -> None:
    """Prefill and encode ignore what they would not use; the other roles refuse what would be lost."""
    request, facts = (
        request_for(extra_args={"vllm_tito": {"sampling_params": params}}),
        multimodal_facts(mode=mode),
    )
    if mode in ONE_TOKEN:
        assert wire(request_for(), facts) == wire(request, facts)
    else:
        assert f"sampling_params.{next(iter(params))}" in refused(request, facts)


@each_mode
def test_answers_are_read_in_the_role_of_the_request(mode: DisaggregationMode) -> None:
    """What the response converter is told names the worker's role."""
    assert mode is convert(request_for(), multimodal_facts(mode=mode)).response.mode


@pytest.mark.rule("R7.72")
def test_an_envelope_still_fills_a_prefill() -> None:
    """A prefill keeps its one token and takes the options that matter to it from the envelope."""
    params = {"skip_special_tokens": False, "max_tokens": 100, "unknown": 1}
    message = wire(request_for(extra_args={"vllm_tito": {"sampling_params": params}}), multimodal_facts(mode=PREFILL))
    assert (1, 1) == (dig(message, "stopping.max_new_tokens"), dig(message, "stopping.min_new_tokens"))
    assert False is dig(message, "response.skip_special_tokens")


@pytest.mark.rule("R7.73", "R7.69")
@pytest.mark.parametrize("mode", [AGGREGATED, DECODE], ids=lambda mode: mode.value)
def test_an_old_front_ends_request(mode: DisaggregationMode) -> None:
    """All that a front end of the 1.4 line puts into its envelope is visible on the wire."""
    params = {
        "max_tokens": 8,
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 3,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "skip_reading_prefix_cache": True,
    }
    message = wire(request_for(extra_args={"vllm_tito": {"sampling_params": params}}), multimodal_facts(mode=mode))
    expected = {
        "stopping.max_new_tokens": 8,
        "stopping.min_new_tokens": 2,
        "stopping.ignore_eos": True,
        "response.output_candidates.top_n": 2,
        "response.prompt_candidates.top_n": 3,
        "response.skip_special_tokens": False,
        "kv.bypass_prefix_cache": True,
    }
    assert expected == {path: dig(message, path) for path in expected}


@pytest.mark.rule("R7.62")
@each_mode
def test_unknown_members_of_an_envelope_are_refused_everywhere(mode: DisaggregationMode) -> None:
    """The envelope itself has the same members in every role."""
    envelope = {"sampling_params": {}, "unknown": 1}
    message = refused(request_for(extra_args={"vllm_tito": envelope}), multimodal_facts(mode=mode))
    assert "extra_args.vllm_tito.unknown is not supported" in message


@pytest.mark.rule("R7.50")
@pytest.mark.parametrize(
    ("data", "accepted"),
    [
        (None, False),
        ({}, False),
        ({"image_url": []}, False),
        ({"image_url": [{"Url": "data:,a"}]}, True),
        ({"video_url": [{"Url": "data:,a"}]}, True),
        ({"image_url": [{"Url": "data:,a"}], "video_url": [{"Url": "data:,b"}]}, True),
        ({"audio_url": [{"Url": "data:,a"}]}, False),
        ({"image_url": [{"Url": "data:,a"}], "audio_url": [{"Url": "data:,b"}]}, False),
    ],
    ids=str,
)
def test_an_encoder_takes_images_and_videos(data: Any, accepted: bool) -> None:
    """An encode request has media, and images and videos only."""
    request, facts = request_for(multi_modal_data=data), multimodal_facts(mode=ENCODE)
    if accepted:
        assert sum(map(len, data.values())) == len(wire(request, facts).media)
    else:
        mixed = "encode mode takes image and video media only"
        without = "multi_modal_data is required in encode mode: image or video media"
        has_media = any((data or {}).values())
        assert f"InvalidRequest: {mixed if has_media else without}" == refused(request, facts)


@pytest.mark.rule("R7.50")
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_an_encoder_takes_prepared_images_and_videos(modality: str) -> None:
    """Prepared media are held to the same."""
    prepared = {
        "mm_hashes": {modality: ["h"]},
        "mm_placeholders": {modality: [{"offset": 0, "length": 1}]},
        "kwargs_data": {modality: ["gA=="]},
    }
    if modality == "audio":
        assert "image and video media only" in refused(features_request(prepared), multimodal_facts(mode=ENCODE))
    else:
        assert 1 == len(wire(features_request(prepared), multimodal_facts(mode=ENCODE)).media)


ENCODE_FAULTS: list[dict[str, Any]] = [
    {"token_ids": []},
    {"prompt_embeds": "x"},
    {"mm_processor_kwargs": {}},
    {"multi_modal_data": None},
    {"encoder_result": {}},
    {"bootstrap_info": {}},
    {"multi_modal_uuids": {"video_url": ["a"]}},
    {"extra_args": {"vllm_tito": {"sampling_params": {}, "features": []}}},
    {"extra_args": {"mm_hashes": [1]}},
    {"extra_args": {"vllm_tito": {"sampling_params": {}, "unknown": 1}}},
    {"extra_args": {"dynamo_mm_routing_hashes": [1]}},
    {"multi_modal_data": {"image_url": [{"Url": "data:,a"}], "audio_url": [{"Url": "data:,b"}]}},
    {"extra_args": {"nvext": {"token_in": False}}},
    {"extra_args": {"unknown": 1}},
]


@pytest.mark.rule("R7.11")
@pytest.mark.parametrize("position", range(len(ENCODE_FAULTS) - 1))
def test_only_the_first_failure_shows(position: int) -> None:
    """Of the faults that media and encoders add, the one that is checked first is reported."""
    first, *later = ENCODE_FAULTS[position:]
    facts = multimodal_facts(mode=ENCODE)
    alone = refused(request_for(**first), facts)
    for second in later:
        if "multi_modal_data" in first and "features" in second.get("extra_args", {}).get("vllm_tito", {}):
            continue  # the features are media, so nothing is missing then
        assert alone == refused(request_for(**merged(first, second)), facts)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both faults in one request; where they want the same member, the first has it."""
    extra = {**second.get("extra_args", {}), **first.get("extra_args", {})}
    return {**second, **first, **({"extra_args": extra} if extra else {})}
