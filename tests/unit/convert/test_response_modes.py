"""Answers to requests with media, and the terminals of prefill and encode workers (spec 8.7 to 8.9)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.conversion import convert
from support.samples import (
    HANDOFF,
    candidates,
    features_request,
    finished,
    media_request,
    minimal_request,
    multimodal_facts,
    prompt_info,
    tokens,
)
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.handoff import PROMPT_IDS_KEY
from trio_sidecar.convert.request import ResponseOptionsState
from trio_sidecar.convert.response import Chunk, ResponseConverter, merge_chunks
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.errors import ErrorKind, ProtocolError
from trio_sidecar.wire import FinishInfo, FinishInfoFinishReason, GenerateResponse, Struct, Value

LENGTH, STOP, ABORTED = FinishInfoFinishReason.LENGTH, FinishInfoFinishReason.STOP, FinishInfoFinishReason.ABORTED
AGGREGATED, PREFILL, DECODE, ENCODE = (
    DisaggregationMode.AGGREGATED,
    DisaggregationMode.PREFILL,
    DisaggregationMode.DECODE,
    DisaggregationMode.ENCODE,
)
EXPANDED = [11, 99, 99, 99, 33]
ENCODED = {
    "request_id": "encode-0",
    "ec_items": [{"key": "image-a", "shape": [1, 729, 2048]}, {"key": "image-b", "shape": [1, 729, 2048]}],
    "nested": {"flags": [True, None, "opaque"]},
}

each_mode = pytest.mark.parametrize("mode", list(DisaggregationMode), ids=lambda mode: mode.value)


def payload(params: Any) -> Struct:
    return struct_from_json(params, label="payload")


def kv_finished(count: int = 1, reason: FinishInfoFinishReason = LENGTH, params: Any = HANDOFF) -> FinishInfo:
    """A prefill's end, with a handoff unless ``params`` is None."""
    return finished(count, reason, kv_transfer_params=None if params is None else payload(params))


def converter(mode: DisaggregationMode = PREFILL, **options: Any) -> ResponseConverter:
    return ResponseConverter(ResponseOptionsState(**{"prompt_tokens": 3, "mode": mode, **options}))


def run(responses: list[GenerateResponse], mode: DisaggregationMode = PREFILL, **options: Any) -> list[Chunk]:
    convert_one = converter(mode, **options).convert
    return [chunk for response in responses if (chunk := convert_one(response)) is not None]


def broken(responses: list[GenerateResponse], mode: DisaggregationMode = PREFILL, **options: Any) -> str:
    """The message of the protocol error that the last response meets."""
    target = converter(mode, **options)
    for response in responses[:-1]:
        assert target.convert(response) is None
    with pytest.raises(ProtocolError) as caught:
        target.convert(responses[-1])
    assert ErrorKind.UNKNOWN is caught.value.kind
    assert not target.finished
    return str(caught.value)


def scored_prompt(ids: list[int]) -> GenerateResponse:
    """Prompt info with a logprob for every id."""
    return prompt_info(
        len(ids),
        token_ids=ids,
        logprobs=[-math.inf] + [-0.25] * (len(ids) - 1),
        ranks=[0] + [1] * (len(ids) - 1),
        candidate_tokens=[candidates() for _ in ids],
    )


# -- Prompt counts (8.7) --------------------------------------------------------------------------------------------


@pytest.mark.rule("R8.29")
@each_mode
def test_raw_media_make_the_prompt_longer(mode: DisaggregationMode) -> None:
    """The engine's count of the expanded prompt replaces ours and is what usage reports."""
    output = [] if mode is ENCODE else [42]
    end = finished(len(output), STOP, kv_transfer_params=payload(HANDOFF), ec_transfer_params=payload(ENCODED))
    ids = list(range(601)) if mode is PREFILL else []
    *_, last = run([prompt_info(601, token_ids=ids), tokens(*output, finish=end)], mode, expands_prompt=True)
    completion = 1 if mode in (AGGREGATED, DECODE) else 0
    usage = {"prompt_tokens": 601, "completion_tokens": completion, "total_tokens": 601 + completion}
    assert usage == last["completion_usage"]


@pytest.mark.rule("R8.29")
def test_a_cancelled_request_counts_the_expanded_prompt() -> None:
    """The cancelled terminal, too, reports what the engine counted."""
    target = converter(AGGREGATED, expands_prompt=True)
    assert 3 == target.cancelled()["completion_usage"]["prompt_tokens"]
    target = converter(AGGREGATED, expands_prompt=True)
    target.convert(prompt_info(601))
    assert 601 == target.cancelled()["completion_usage"]["prompt_tokens"]


@pytest.mark.rule("R8.29", "R8.31")
@each_mode
def test_which_requests_may_grow(mode: DisaggregationMode) -> None:
    """Raw media may make the prompt longer; prepared ones and text may not, whatever the role."""
    facts = multimodal_facts(mode=mode)
    decode_input: dict[str, Any] = {"prefill_result": {"disaggregated_params": {}}}
    raw = ResponseConverter(convert(media_request(**decode_input), facts).response)
    assert raw.convert(prompt_info(601, token_ids=list(range(601)))) is None
    requests = [features_request(**decode_input)]
    if mode is not ENCODE:
        requests.append(minimal_request(**decode_input))
    for request in requests:
        target = ResponseConverter(convert(request, facts).response)
        with pytest.raises(ProtocolError, match="prompt token count 601, but 3 were sent"):
            target.convert(prompt_info(601))


@pytest.mark.rule("R8.29", "R8.23")
def test_prompt_logprobs_fit_the_expanded_prompt() -> None:
    """The arrays must have the engine's length, and there is a row for each of its tokens."""
    (last,) = run(
        [scored_prompt(EXPANDED), tokens(42, finish=finished(1))], AGGREGATED, prompt_logprobs=0, expands_prompt=True
    )
    assert 5 == len(last["engine_data"]["prompt_logprobs"])  # type: ignore[arg-type]
    wrong = scored_prompt([11, 22, 33])
    assert wrong.prompt_info is not None
    wrong.prompt_info.num_prompt_tokens = 5
    message = broken([wrong], AGGREGATED, prompt_logprobs=0, expands_prompt=True)
    assert "prompt logprob array lengths [3, 3, 3, 3]" in message
    assert "expected 5 each" in message


# -- Prefill (8.8) --------------------------------------------------------------------------------------------------


@pytest.mark.rule("8.8", "R8.6", "R8.13")
@pytest.mark.parametrize(("reason", "name"), [(STOP, "stop"), (LENGTH, "length")])
def test_a_prefill_hands_over(reason: FinishInfoFinishReason, name: str) -> None:
    """The terminal is all there is: no ids, no text, no completion, and the handoff with whole numbers as integers."""
    (only,) = run([tokens(42, text="x"), tokens(43, text="y", finish=kv_finished(2, reason))])
    assert {
        "token_ids": [],
        "index": 0,
        "finish_reason": name,
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
        "disaggregated_params": HANDOFF,
    } == only
    assert repr(HANDOFF) == repr(only["disaggregated_params"])


@pytest.mark.rule("8.8")
@pytest.mark.parametrize("reason", [STOP, LENGTH], ids=lambda reason: reason.name)
def test_a_prefill_without_a_handoff_is_useless(reason: FinishInfoFinishReason) -> None:
    """A prefill that ends well must bring the payload; an empty one is a payload."""
    message = broken([tokens(42, finish=kv_finished(1, reason, None))])
    assert "missing kv_transfer_params" in message
    (only,) = run([tokens(42, finish=kv_finished(1, reason, {}))])
    assert {} == only["disaggregated_params"]


@pytest.mark.rule("8.8", "R8.32", "R8.33")
@pytest.mark.parametrize("params", [None, HANDOFF], ids=["without payload", "with payload"])
@pytest.mark.parametrize("media", [False, True], ids=["text", "media"])
def test_an_aborted_prefill_is_cancelled(params: Any, media: bool) -> None:
    """It ends as cancelled and hands nothing over, whatever payload came and whether or not prompt ids did."""
    (only,) = run([tokens(42, text="x", finish=kv_finished(1, ABORTED, params))], expands_prompt=media)
    assert {
        "token_ids": [],
        "index": 0,
        "finish_reason": "cancelled",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
    } == only


@pytest.mark.rule("R8.32")
@pytest.mark.parametrize("params", [None, HANDOFF], ids=["without payload", "with payload"])
def test_an_aborted_prefill_keeps_its_prompt_data(params: Any) -> None:
    """The prompt's logprobs were computed, so they are delivered, without KV parameters."""
    target = converter(prompt_logprobs=0, expands_prompt=True)
    target.convert(scored_prompt([11, 22, 33]))
    only = target.convert(tokens(42, finish=kv_finished(1, ABORTED, params)))
    assert only is not None
    rows = [None, {"22": {"logprob": -0.25, "rank": 1}}, {"33": {"logprob": -0.25, "rank": 1}}]
    assert {"prompt_logprobs": rows} == only["engine_data"]
    assert "disaggregated_params" not in only
    assert target.finished
    assert target.aborted_by_engine


@pytest.mark.rule("R8.32")
def test_a_payload_that_is_dropped_is_not_read() -> None:
    """A broken payload on an aborted prefill harms nobody."""
    nan = Struct(fields={"a": Value(number_value=math.nan)})
    (only,) = run([tokens(42, finish=finished(1, ABORTED, kv_transfer_params=nan))])
    assert "cancelled" == only["finish_reason"]
    assert "NaN" in broken([tokens(42, finish=finished(1, LENGTH, kv_transfer_params=nan))])


@pytest.mark.rule("R8.30")
def test_a_prefill_with_media_hands_the_expanded_prompt_over() -> None:
    """The expanded prompt travels in the handoff under the private key, beside the engine's members."""
    (only,) = run([prompt_info(5, token_ids=EXPANDED), tokens(42, finish=kv_finished())], expands_prompt=True)
    assert {**HANDOFF, PROMPT_IDS_KEY: EXPANDED} == only["disaggregated_params"]
    assert "_dynamo_sidecar_multimodal_prompt_token_ids" == PROMPT_IDS_KEY


@pytest.mark.rule("R8.30")
@pytest.mark.parametrize(
    ("responses", "named"),
    [
        (
            [tokens(42, finish=kv_finished())],
            ": a multimodal prefill did not return the expanded prompt's token ids",
        ),
        ([prompt_info(5), tokens(42, finish=kv_finished())], "did not return the expanded prompt's token ids"),
        ([prompt_info(5, token_ids=[11, 99])], "returned 2 prompt token ids, but counted 5"),
        ([prompt_info(3, token_ids=EXPANDED)], "returned 5 prompt token ids, but counted 3"),
    ],
    ids=["no prompt info", "no ids", "too few", "too many"],
)
def test_a_prefill_with_media_must_return_its_prompt(responses: list[GenerateResponse], named: str) -> None:
    """Without the expanded prompt, or with one of another length, the handoff would be wrong."""
    assert named in broken(responses, expands_prompt=True)


@pytest.mark.rule("R8.30", "R8.31")
@pytest.mark.parametrize(
    ("mode", "expands"), [(PREFILL, False), (AGGREGATED, True), (DECODE, True)], ids=["text", "aggregated", "decode"]
)
def test_only_a_prefill_with_raw_media_adds_its_prompt(mode: DisaggregationMode, expands: bool) -> None:
    """Text, prepared media and other roles leave the payload as it is, prompt ids or not."""
    responses = [prompt_info(3, token_ids=[11, 22, 33]), tokens(42, finish=kv_finished())]
    (only,) = run(responses, mode, expands_prompt=expands)
    assert HANDOFF == only["disaggregated_params"]


# -- Encode (8.9) ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("R8.34", "R8.6", "R8.39")
def test_an_encode_hands_over() -> None:
    """The terminal carries the encoder's payload, whole, and nothing else, KV parameters included."""
    end = finished(0, STOP, ec_transfer_params=payload(ENCODED), kv_transfer_params=payload(HANDOFF))
    (only,) = run([prompt_info(), tokens(text="x"), tokens(finish=end)], ENCODE)
    assert {
        "token_ids": [],
        "index": 0,
        "finish_reason": "stop",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
        "encoder_result": ENCODED,
    } == only
    assert repr(ENCODED) == repr(only["encoder_result"])
    assert only == merge_chunks(only)


@pytest.mark.rule("R8.35", "R8.36", "R8.37", "R8.9")
@pytest.mark.parametrize(
    ("response", "named"),
    [
        (tokens(finish=finished(0, STOP)), "missing valid ec_transfer_params"),
        (tokens(finish=finished(0, LENGTH, ec_transfer_params=payload(ENCODED))), "invalid finish reason"),
        (tokens(finish=finished(0, LENGTH)), "invalid finish reason"),
        (tokens(42), "produced output tokens: 1"),
        (tokens(42, finish=finished(1, STOP, ec_transfer_params=payload(ENCODED))), "produced output tokens"),
        (tokens(42, finish=finished(1, ABORTED)), "produced output tokens"),
        (tokens(42, num_tokens=2), "num_tokens 2"),
        (tokens(finish=finished(1, STOP)), "terminal num_output_tokens 1"),
        (
            tokens(finish=finished(0, STOP, ec_transfer_params=Struct(fields={"a": Value(number_value=math.inf)}))),
            "ec_transfer_params holds NaN or infinity",
        ),
    ],
    ids=["no payload", "length", "length only", "token", "token at the end", "aborted token", "count", "total", "inf"],
)
def test_a_broken_encode(response: GenerateResponse, named: str) -> None:
    """An encode stops with a payload and without a token, or it is broken."""
    assert named in broken([response], ENCODE)


@pytest.mark.rule("R8.38")
@pytest.mark.parametrize("params", [None, ENCODED], ids=["without payload", "with payload"])
def test_an_aborted_encode_is_cancelled(params: Any) -> None:
    """It ends as cancelled, needs no payload and hands none over."""
    target = converter(ENCODE)
    end = finished(0, ABORTED, ec_transfer_params=None if params is None else payload(params))
    only = target.convert(tokens(finish=end))
    assert only is not None
    assert {"token_ids", "index", "finish_reason", "completion_usage"} == only.keys()
    assert "cancelled" == only["finish_reason"]
    assert target.aborted_by_engine


@pytest.mark.rule("R8.39")
@pytest.mark.parametrize("mode", [AGGREGATED, PREFILL, DECODE], ids=lambda mode: mode.value)
def test_other_roles_ignore_an_encoders_payload(mode: DisaggregationMode) -> None:
    """A payload for encoders on another role's terminal goes nowhere, also a broken one."""
    nan = Struct(fields={"a": Value(number_value=math.nan)})
    end = finished(1, STOP, ec_transfer_params=nan, kv_transfer_params=payload(HANDOFF))
    (only,) = run([tokens(42, finish=end)], mode)
    assert "encoder_result" not in only


@pytest.mark.rule("R8.15", "R8.16")
@pytest.mark.parametrize("mode", [AGGREGATED, DECODE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("reason", [STOP, LENGTH, ABORTED], ids=lambda reason: reason.name)
def test_roles_that_generate_forward_a_connectors_payload(
    mode: DisaggregationMode, reason: FinishInfoFinishReason
) -> None:
    """A payload on an aggregated or decode terminal is forwarded however it ended, and need not be there."""
    (only,) = run([tokens(42, finish=kv_finished(1, reason))], mode)
    assert HANDOFF == only["disaggregated_params"]
    (only,) = run([tokens(42, finish=kv_finished(1, reason, None))], mode)
    assert "disaggregated_params" not in only


# -- All roles ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("8.4", "R8.17")
@pytest.mark.parametrize("mode", [AGGREGATED, PREFILL, DECODE], ids=lambda mode: mode.value)
def test_hidden_stops_stay_hidden_in_every_role(mode: DisaggregationMode) -> None:
    """A stop that only the model knows, and an EOS that the user did not list, are never reported."""
    for reason, user, expected in (
        ({"stop_token_id": 2}, frozenset[int](), None),
        ({"stop_token_id": 2}, frozenset({2}), 2),
        ({"eos_token_id": 2}, frozenset[int](), None),
        ({"eos_token_id": 2}, frozenset({2}), 2),
    ):
        end = finished(1, STOP, kv_transfer_params=payload(HANDOFF), **reason)
        (only,) = run([tokens(42, finish=end)], mode, user_stop_ids=user, hidden_stop_ids=frozenset({2}))
        assert expected == only.get("stop_reason")


@pytest.mark.rule("R8.8")
@pytest.mark.parametrize("mode", [PREFILL, ENCODE], ids=lambda mode: mode.value)
def test_logprobs_are_not_for_roles_that_do_not_generate(mode: DisaggregationMode) -> None:
    """Their arrays are neither checked nor delivered."""
    end = finished(0, STOP, kv_transfer_params=payload(HANDOFF), ec_transfer_params=payload(ENCODED))
    (only,) = run([tokens(finish=end, logprobs=[-1.0], ranks=[])], mode, logprobs=2)
    assert not {"log_probs", "top_logprobs"} & only.keys()
