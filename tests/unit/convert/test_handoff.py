from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversion import convert, dig, refused, wire
from support.samples import (
    HANDOFF,
    decode_request,
    media_request,
    minimal_request,
    model_facts,
    multimodal_facts,
    rich_request,
)
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.fields import describe
from trio_sidecar.convert.handoff import PROMPT_IDS_KEY
from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.wire.codec import decode, encode

if TYPE_CHECKING:
    from trio_sidecar.wire import GenerateRequest

AGGREGATED, PREFILL, DECODE, ENCODE = (
    model_facts(mode=mode)
    for mode in (
        DisaggregationMode.AGGREGATED,
        DisaggregationMode.PREFILL,
        DisaggregationMode.DECODE,
        DisaggregationMode.ENCODE,
    )
)


def kv(message: GenerateRequest) -> object:
    """The KV transfer parameters that go out."""
    assert message.kv is not None
    params = message.kv.kv_transfer_params
    return None if params is None else json_from_struct(params, label="kv")  # an empty message is false


def handed_over(params: object, **top: Any) -> dict[str, Any]:
    """A minimal request as it reaches a decode worker."""
    return minimal_request(prefill_result={"disaggregated_params": params}, **top)


@pytest.mark.rule("R7.31")
@pytest.mark.parametrize(
    ("extra_args", "sent"),
    [
        (None, {"do_remote_decode": True}),
        ({}, {"do_remote_decode": True}),
        ({"kv_transfer_params": {}}, {"do_remote_decode": True}),
        ({"kv_transfer_params": {"do_remote_decode": False}}, {"do_remote_decode": True}),
        ({"kv_transfer_params": {"do_remote_decode": None, "a": [1]}}, {"do_remote_decode": True, "a": [1]}),
        (
            {"vllm_tito": {"sampling_params": {}, "kv_transfer_params": {"from": "legacy"}}},
            {"do_remote_decode": True, "from": "legacy"},
        ),
    ],
    ids=str,
)
def test_prefill_orders_a_remote_decode(extra_args: object, sent: object) -> None:
    """Whatever the caller says, the engine is told to keep the blocks for a decode worker."""
    request = minimal_request(extra_args=extra_args)
    before = copy.deepcopy(request)
    assert sent == kv(wire(request, PREFILL))
    assert before == request


@pytest.mark.rule("R7.31", "R7.32")
@pytest.mark.parametrize("payload", [[], None, "x", 1], ids=str)
@pytest.mark.parametrize("model", [AGGREGATED, PREFILL], ids=["agg", "prefill"])
def test_a_callers_payload_must_be_an_object(payload: object, model: Any) -> None:
    """A payload of another kind is refused by name, null included."""
    message = refused(minimal_request(extra_args={"kv_transfer_params": payload}), model)
    assert f"kv_transfer_params must be a JSON object, got {describe(payload)}" in message


@pytest.mark.rule("FR-082")
@pytest.mark.parametrize(
    "mode", [DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL], ids=lambda mode: mode.value
)
@pytest.mark.parametrize(
    "extra_args",
    [
        {"kv_transfer_params": {"remote_host": "10.0.0.1"}},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": None},
        {"vllm_tito": {"sampling_params": {}, "kv_transfer_params": {"remote_host": "10.0.0.1"}}},
    ],
    ids=["peer", "empty", "null", "envelope"],
)
def test_a_callers_handoff_can_be_refused(mode: DisaggregationMode, extra_args: object) -> None:
    """With `--caller-handoff off` no client says from which peer the engine fetches; requests without are taken."""
    closed = model_facts(mode=mode, caller_handoff=False)
    message = refused(minimal_request(extra_args=extra_args), closed)
    expected = (
        "extra_args.kv_transfer_params must be absent: this worker takes none from callers (--caller-handoff off)"
    )
    assert f"InvalidRequest: {expected}" == message
    assert kv(wire(minimal_request(), closed)) == kv(wire(minimal_request(), model_facts(mode=mode)))


@pytest.mark.rule("FR-082")
@pytest.mark.parametrize("mode", [DisaggregationMode.DECODE, DisaggregationMode.ENCODE], ids=lambda mode: mode.value)
def test_a_handoff_that_is_ignored_is_no_fault(mode: DisaggregationMode) -> None:
    """Decode takes the prefill worker's and encode none, so that a caller's does no harm there."""
    extra_args = {"kv_transfer_params": {"remote_host": "10.0.0.1"}}
    made = decode_request if mode is DisaggregationMode.DECODE else media_request
    facts = multimodal_facts(mode=mode)
    expected = kv(wire(made(), facts))
    assert expected == kv(wire(made(extra_args=extra_args), multimodal_facts(mode=mode, caller_handoff=False)))


@pytest.mark.rule("R7.33")
@pytest.mark.parametrize(
    ("result", "named"),
    [
        (None, "prefill_result is required in decode mode"),
        ("invalid", "prefill_result must be a JSON object, got the text 'invalid'"),
        ({}, "prefill_result.disaggregated_params must be a JSON object, got null"),
        ({"disaggregated_params": []}, "prefill_result.disaggregated_params must be a JSON object, got an array"),
        ({"disaggregated_params": "invalid"}, "disaggregated_params must be a JSON object, got the text 'invalid'"),
        ({"disaggregated_params": {"a": 2**53 + 1}}, "kv_transfer_params holds 9007199254740993"),
    ],
    ids=str,
)
def test_decode_needs_a_handoff(result: object, named: str) -> None:
    """Without the prefill worker's payload a decode worker has nothing to decode."""
    assert named in refused(minimal_request(prefill_result=result), DECODE)


@pytest.mark.rule("R7.33", "7.10")
def test_decode_takes_the_prefill_workers_payload() -> None:
    """The handoff goes out and the caller's own parameters do not."""
    assert {**HANDOFF, "remote_port": "20097"} == kv(wire(decode_request(), DECODE))
    assert 1 == dig(wire(decode_request(), DECODE), "stopping.max_new_tokens")


@pytest.mark.rule("R7.34")
@pytest.mark.parametrize(
    ("port", "sent"),
    [
        (5600, "5600"),
        (5600.0, "5600"),
        ("5600", "5600"),
        (0, "0"),
        (-0.0, "0"),
        (5600.5, 5600.5),
        (-1, -1),
        (-5600.0, -5600),
        (True, True),
        (None, None),
        ([5600], [5600]),
        (2**64 - 1, str(2**64 - 1)),
        (1e300, 1e300),
    ],
    ids=str,
)
def test_a_whole_port_goes_out_as_text(port: object, sent: object) -> None:
    """A port that is a whole number becomes text, anything else stays as it is."""
    assert repr({"remote_port": sent}) == repr(kv(wire(handed_over({"remote_port": port}), DECODE)))


@pytest.mark.rule("R7.34")
@pytest.mark.parametrize("port", [2**64, 10**5000, math.inf, math.nan], ids=["2**64", "10**5000", "inf", "nan"])
def test_a_port_that_is_none_is_refused(port: object) -> None:
    """A number that no port could be, and that a double cannot carry, is refused like any other member."""
    assert "kv_transfer_params holds" in refused(handed_over({"remote_port": port}), DECODE)


@pytest.mark.rule("R7.34")
def test_the_rest_of_a_handoff_is_opaque() -> None:
    """Nulls, nesting and unknown members pass unchanged, and converting twice gives the same."""
    params = {"flags": [True, None, {"ids": [1, 2]}], "nested": {"remote_port": 5600}, "x": None}
    request = handed_over(params)
    before = copy.deepcopy(request)
    assert params == kv(wire(request, DECODE)) == kv(wire(request, DECODE))
    assert before == request


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.rule("R7.34", "R8.16")
@given(st.dictionaries(st.text().filter(lambda key: key != "remote_port"), JSON, max_size=4))
def test_any_handoff_makes_the_round_trip(params: dict[str, Any]) -> None:
    """Whatever JSON an engine hands over reaches the other engine as it was, bytes of the wire included."""
    message = wire(handed_over(params), DECODE)
    assert params == kv(decode(type(message), encode(message)))


@pytest.mark.rule("R7.35")
@pytest.mark.parametrize("media", [True, False], ids=["media", "text"])
def test_the_private_prompt_never_reaches_the_engine_with_media(media: bool) -> None:
    """With media the expanded prompt is taken out of the handoff, and the original prompt and media go out."""
    images = {"multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}} if media else {}
    params = {PROMPT_IDS_KEY: [11, 99, 99, 33], "a": 1}
    converted = wire(handed_over(params, **images), multimodal_facts(mode=DisaggregationMode.DECODE))
    assert ({"a": 1} if media else params) == kv(converted)
    assert [11, 22, 33] == dig(converted, "token_ids.ids")
    assert media is bool(converted.media)
    assert PROMPT_IDS_KEY in params


@pytest.mark.rule("R7.36", "7.10")
@pytest.mark.parametrize(
    ("model", "request_"),
    [(AGGREGATED, minimal_request()), (PREFILL, minimal_request()), (DECODE, decode_request())],
    ids=["agg", "prefill", "decode"],
)
def test_an_encoders_result_is_sent_on(model: Any, request_: dict[str, Any]) -> None:
    """Every role but the encoder itself passes an encoder's result to its engine, unchanged."""
    result = {"ec_items": [{"key": "image-a", "shape": [1, 729, 2048]}], "flags": [True, None]}
    struct = dig(wire({**request_, "encoder_result": result}, model), "kv.ec_transfer_params")
    assert result == json_from_struct(struct, label="ec")  # type: ignore[arg-type]
    assert dig(wire(request_, model), "kv.ec_transfer_params") is None
    wrong: object
    for wrong in ([], "x", 1):
        assert "encoder_result must be a JSON object" in refused({**request_, "encoder_result": wrong}, model)
    inexact = refused({**request_, "encoder_result": {"a": 2**53 + 1}}, model)
    assert "ec_transfer_params holds 9007199254740993" in inexact


@pytest.mark.rule("7.10")
def test_encode_sends_no_payload() -> None:
    """An encode engine gets neither the caller's KV parameters nor anybody's encoder result."""
    facts = multimodal_facts(mode=DisaggregationMode.ENCODE)
    images = {"multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}}
    converted = wire(rich_request(**images), facts)
    assert kv(converted) is None
    assert dig(converted, "kv.ec_transfer_params") is None
    message = refused(rich_request(**images, encoder_result={}), facts)
    assert "InvalidRequest: encoder_result must be absent in encode mode, which makes it" == message


@pytest.mark.rule("R7.37", "R7.38")
@pytest.mark.parametrize(
    ("mode", "routing", "rank"),
    [
        (DisaggregationMode.AGGREGATED, {"dp_rank": 5, "prefill_dp_rank": 3}, "5"),
        (DisaggregationMode.DECODE, {"dp_rank": 5, "prefill_dp_rank": 3}, "5"),
        (DisaggregationMode.PREFILL, {"dp_rank": 5, "prefill_dp_rank": 3}, "3"),
        (DisaggregationMode.PREFILL, {"dp_rank": 5, "prefill_dp_rank": 0}, "0"),
        (DisaggregationMode.PREFILL, {"dp_rank": 5}, "5"),
        (DisaggregationMode.PREFILL, {}, None),
        (DisaggregationMode.DECODE, {"prefill_dp_rank": 3}, None),
        (DisaggregationMode.ENCODE, {"dp_rank": 5, "prefill_dp_rank": 3}, None),
    ],
    ids=str,
)
def test_each_role_has_its_rank(mode: DisaggregationMode, routing: dict[str, int], rank: str | None) -> None:
    """A prefill worker prefers its own rank field, an encoder has none."""
    images = {"multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}}
    request = handed_over({}, routing=routing, **images)
    assert ({"x-data-parallel-rank": rank} if rank else {}) == convert(request, multimodal_facts(mode=mode)).metadata
