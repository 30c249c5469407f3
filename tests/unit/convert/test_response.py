from __future__ import annotations

import math
import time
from typing import Any

import pytest

from support.conversion import convert, converter, run
from support.samples import candidates, finished, minimal_request, prompt_info, tokens
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.response import ResponseConverter
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.errors import ErrorKind, ProtocolError
from trio_sidecar.wire import FinishInfo, FinishInfoFinishReason, GenerateResponse, SequenceOutput, Struct, Value

LENGTH, STOP, ABORTED = FinishInfoFinishReason.LENGTH, FinishInfoFinishReason.STOP, FinishInfoFinishReason.ABORTED


def broken(*responses: GenerateResponse, **options: Any) -> str:
    """The message of the protocol error that the last response meets; the ones before it are fine."""
    target = converter(**options)
    for response in responses[:-1]:
        target.convert(response)
    with pytest.raises(ProtocolError) as caught:
        target.convert(responses[-1])
    assert ErrorKind.UNKNOWN is caught.value.kind
    message = str(caught.value)
    assert message.startswith("vLLM sent an invalid gRPC response: ")
    return message


@pytest.mark.rule("R8.1", "R8.2")
def test_messages_without_tokens_emit_nothing() -> None:
    """Prompt info alone, an empty message and an empty output are no chunks."""
    assert [] == run([prompt_info(), GenerateResponse(), GenerateResponse(outputs=SequenceOutput())])


@pytest.mark.rule("R8.3", "R8.7", "R8.14")
def test_a_delta_has_ids_text_and_index_only() -> None:
    """A delta carries its own tokens and nothing that belongs to the end."""
    chunks = run([tokens(42, text=" a"), tokens(43, 44, text=" b c")])
    assert [
        {"token_ids": [42], "text": " a", "index": 0},
        {"token_ids": [43, 44], "text": " b c", "index": 0},
    ] == chunks


@pytest.mark.rule("R8.4")
def test_text_is_always_present() -> None:
    """Text that the engine holds back for stop matching is an empty text, not an absent one."""
    chunks = run([tokens(42), tokens(43, text=" buffered text"), tokens(finish=finished(2))])
    assert ["", " buffered text", ""] == [chunk["text"] for chunk in chunks]


@pytest.mark.rule("R8.5")
def test_text_without_tokens_is_dropped_before_the_end() -> None:
    """A message that has no tokens and does not end the stream emits nothing."""
    assert [] == run([tokens(text="stray")])


@pytest.mark.rule("R8.11", "R8.13")
def test_a_terminal_may_carry_tokens() -> None:
    """Tokens of the last message go out with the terminal fields, and count."""
    first, last = run([tokens(42, text="a"), tokens(43, 44, text="b", finish=finished(3, LENGTH))])
    assert {"token_ids": [42], "text": "a", "index": 0} == first
    assert {
        "token_ids": [43, 44],
        "text": "b",
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    } == last


def test_a_converter_begins_with_nothing_ended() -> None:
    """Its marks are plain booleans from the beginning."""
    target = converter()
    assert target.finished is False
    assert target.aborted_by_engine is False


@pytest.mark.rule("R10.18")
def test_nothing_follows_the_terminal() -> None:
    """Once the terminal is out, later messages are ignored."""
    target = converter()
    assert target.convert(tokens(42, finish=finished(1))) is not None
    assert target.finished
    assert target.convert(tokens(43)) is None
    assert 1 == target.completion_tokens


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"index": 1}, "sequence index 1"),
    ({"num_tokens": 2}, "num_tokens 2, but 1 token ids"),
    ({"num_tokens": 0}, "num_tokens 0, but 1 token ids"),
    ({"finish_info": finished(2)}, "terminal num_output_tokens 2, but 1 were counted"),
    ({"finish_info": FinishInfo(1, FinishInfoFinishReason(42))}, "unknown finish reason 42"),
    ({"finish_info": FinishInfo(1, FinishInfoFinishReason(0))}, ": a terminal with finish reason NOT_FINISHED"),
    (
        {"logprobs": []},
        "output logprob array lengths [0, 1, 1] (logprobs, ranks, candidate_tokens), expected 1 each",
    ),
    ({"ranks": []}, "output logprob array lengths [1, 0, 1]"),
    ({"candidate_tokens": []}, "output logprob array lengths [1, 1, 0]"),
    ({"logprobs": [-1.0, -1.0]}, "output logprob array lengths [2, 1, 1]"),
]


@pytest.mark.rule("8.2", "R8.8")
@pytest.mark.parametrize(("changes", "named"), MALFORMED, ids=lambda value: str(value)[:40])
def test_malformed_outputs(changes: dict[str, Any], named: str) -> None:
    """Each mutation of a good terminal is a protocol error that names what is wrong."""
    good: dict[str, Any] = {"scored": True, "finish": finished(1, STOP, stop_token_id=2)}
    assert 1 == len(run([tokens(42, **good)], logprobs=1, hidden_stop_ids=frozenset({2})))
    bad = tokens(42, scored=True, finish=good["finish"])
    for name, value in changes.items():
        setattr(bad.outputs, name, value)
    assert named in broken(bad, logprobs=1)


@pytest.mark.rule("8.2", "R8.27")
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_the_prompt_count_is_always_checked(prompt_logprobs: int | None) -> None:
    """The engine must have seen as many prompt tokens as were sent."""
    assert "prompt token count 4, but 3 were sent" in broken(prompt_info(4), prompt_logprobs=prompt_logprobs)


@pytest.mark.rule("8.2")
def test_prompt_arrays_must_be_complete() -> None:
    """Each of the four prompt columns must have one entry per prompt token."""
    columns: dict[str, Any] = {
        "token_ids": [11, 22, 33],
        "logprobs": [0.0] * 3,
        "ranks": [0] * 3,
        "candidate_tokens": [candidates()] * 3,
    }
    for missing in columns:
        info = prompt_info(**{name: column for name, column in columns.items() if name != missing})
        lengths = [0 if name == missing else 3 for name in columns]
        said = f"prompt logprob array lengths {lengths} (token_ids, logprobs, ranks, candidate_tokens), expected 3 each"
        assert said in broken(info, prompt_logprobs=0)


@pytest.mark.rule("R8.8", "R8.19")
@pytest.mark.parametrize(
    "options", [{}, {"mode": DisaggregationMode.PREFILL, "logprobs": 1}], ids=["not asked for", "prefill"]
)
def test_logprob_arrays_are_not_checked_without_need(options: dict[str, Any]) -> None:
    """Where logprobs do not matter their arrays may have any length."""
    run([tokens(42, logprobs=[-1.0, -2.0])], **options)


@pytest.mark.rule("R8.9")
def test_the_first_fault_is_reported() -> None:
    """Of several faults the one that comes first in the order of checks shows."""
    faults: list[tuple[dict[str, Any], str]] = [
        ({"index": 1}, "sequence index"),
        ({"num_tokens": 5}, "num_tokens 5"),
        ({"ranks": []}, "output logprob"),
        ({"finish_info": FinishInfo(9, FinishInfoFinishReason(42))}, "num_output_tokens"),
    ]
    for start in range(len(faults)):
        bad = tokens(42, scored=True)
        for changes, _ in faults[start:]:
            for name, value in changes.items():
                setattr(bad.outputs, name, value)
        assert faults[start][1] in broken(bad, logprobs=1)
        bad.prompt_info = prompt_info(9).prompt_info
        assert "prompt token count" in broken(bad, logprobs=1)


@pytest.mark.rule("R8.10")
def test_a_malformed_terminal_leaves_what_was_delivered() -> None:
    """Tokens delivered before a malformed terminal stand."""
    target = converter()
    assert {"token_ids": [101], "text": "x", "index": 0} == target.convert(tokens(101, text="x"))
    with pytest.raises(ProtocolError, match="unknown finish reason 999"):
        target.convert(tokens(finish=finished(1, FinishInfoFinishReason(999))))
    assert not target.finished


@pytest.mark.rule("R8.12", "FR-019")
@pytest.mark.parametrize(
    ("reason", "name", "aborted"), [(LENGTH, "length", False), (STOP, "stop", False), (ABORTED, "cancelled", True)]
)
def test_finish_reasons(reason: FinishInfoFinishReason, name: str, aborted: bool) -> None:
    """Each reason has its name in Dynamo; an abort is also told apart for the session."""
    target = converter()
    chunk = target.convert(tokens(42, finish=finished(1, reason)))
    assert chunk is not None
    assert name == chunk["finish_reason"]
    assert aborted is target.aborted_by_engine


@pytest.mark.rule("R8.13")
@pytest.mark.parametrize(
    ("mode", "completion"),
    [(DisaggregationMode.AGGREGATED, 3), (DisaggregationMode.DECODE, 3)],
)
def test_usage(mode: DisaggregationMode, completion: int) -> None:
    """Usage counts prompt, completion and both."""
    *_, last = run([tokens(42), tokens(43, 44), tokens(finish=finished(3))], mode=mode)
    expected = {"prompt_tokens": 3, "completion_tokens": completion, "total_tokens": 3 + completion}
    assert expected == last["completion_usage"]


@pytest.mark.rule("FR-073")
@pytest.mark.parametrize("cached", [0, 2])
def test_cached_tokens_reach_usage(cached: int) -> None:
    """The engine's count of cached prompt tokens is part of usage, zero included."""
    (last,) = run([tokens(42, finish=finished(1, num_cached_tokens=cached))])
    assert {"cached_tokens": cached} == last["completion_usage"]["prompt_tokens_details"]


@pytest.mark.rule("R8.15", "R8.16", "FR-074")
def test_a_handoff_on_the_terminal_is_forwarded() -> None:
    """The engine's handoff payload is decoded with whole numbers as integers; without one there is none."""
    payload = {"remote_port": 5600, "ids": [7, None]}
    kv = struct_from_json(payload, label="kv_transfer_params")
    (last,) = run([tokens(42, finish=finished(1, kv_transfer_params=kv))])
    assert repr(payload) == repr(last["disaggregated_params"])
    (last,) = run([tokens(42, finish=finished(1))])
    assert "disaggregated_params" not in last


@pytest.mark.rule("R8.39")
def test_an_encoder_payload_is_ignored_here() -> None:
    """A payload for encoders on another role's terminal goes nowhere."""
    ec = struct_from_json({"a": 1}, label="ec_transfer_params")
    (last,) = run([tokens(42, finish=finished(1, ec_transfer_params=ec))])
    assert {"token_ids", "text", "index", "finish_reason", "completion_usage"} == last.keys()


@pytest.mark.rule("R9.7")
def test_a_handoff_with_nan_is_a_protocol_error() -> None:
    """A payload that is not JSON names itself."""
    kv = Struct(fields={"a": Value(number_value=math.nan)})
    message = broken(tokens(42, finish=finished(1, kv_transfer_params=kv)))
    assert "kv_transfer_params holds NaN or infinity" in message


@pytest.mark.rule("8.4", "R8.17", "FR-058")
@pytest.mark.parametrize(
    ("wire_reason", "user", "expected"),
    [
        ({"stop_string": "done"}, set(), "done"),
        ({"stop_string": ""}, set(), ""),
        ({"stop_token_id": 42}, {42}, 42),
        ({"stop_token_id": 2}, set(), None),
        ({"stop_token_id": 2}, {2}, 2),
        ({"stop_token_id": 99}, set(), 99),
        ({"stop_token_id": 0}, {0}, 0),
        ({"eos_token_id": 2}, set(), None),
        ({"eos_token_id": 2}, {2}, 2),
        ({"eos_token_id": 99}, set(), None),
        ({}, set(), None),
    ],
    ids=str,
)
def test_stop_reasons(wire_reason: dict[str, Any], user: set[int], expected: object) -> None:
    """The user learns of a stop string or of an id they chose; a stop that only the model knows stays hidden."""
    response = tokens(42, finish=finished(1, STOP, **wire_reason))
    (chunk,) = run([response], user_stop_ids=frozenset(user), hidden_stop_ids=frozenset({2}))
    assert expected == chunk.get("stop_reason")
    assert (expected is None) is ("stop_reason" not in chunk)


@pytest.mark.rule("8.4")
def test_stop_ids_of_the_request_decide() -> None:
    """The lists that decide are those of the converted request, the user's and the model's kept apart."""
    request = minimal_request(stop={"stop_token_ids": [7], "stop_token_ids_hidden": [2, 7]})
    for token, expected in ((7, 7), (2, None)):
        target = ResponseConverter(convert(request).response)
        chunk = target.convert(tokens(token, finish=finished(1, STOP, stop_token_id=token)))
        assert chunk is not None
        assert expected == chunk.get("stop_reason")


@pytest.mark.rule("10.1")
@pytest.mark.parametrize(("delivered", "total"), [([], 3), ([tokens(42), tokens(43, 44)], 6)], ids=["none", "three"])
def test_the_cancelled_terminal(delivered: list[GenerateResponse], total: int) -> None:
    """It has no tokens, counts what was delivered, and nothing follows it."""
    target = converter()
    for response in delivered:
        target.convert(response)
    assert {
        "token_ids": [],
        "index": 0,
        "finish_reason": "cancelled",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": total - 3, "total_tokens": total},
    } == target.cancelled()
    assert target.finished
    assert not target.aborted_by_engine
    assert target.convert(tokens(45)) is None


@pytest.mark.rule("10")
def test_a_cancelled_prefill_completes_nothing() -> None:
    """The completion count of a role that delivers no tokens is 0."""
    target = converter(mode=DisaggregationMode.PREFILL)
    target.convert(tokens(42))
    assert {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3} == target.cancelled()["completion_usage"]


def test_a_plain_delta_is_cheap() -> None:
    """The common case stays far below what receiving the message costs; the ceiling leaves room for a busy machine."""
    target, response = converter(), tokens(42, text=" a")
    began = time.perf_counter()
    for _ in range(10_000):
        target.convert(response)
    assert (time.perf_counter() - began) / 10_000 < 50e-6
