"""What the codec refuses, and how it says so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trio_sidecar import wire
from trio_sidecar.wire.codec import DecodeError, EncodeError, decode, encode
from trio_sidecar.wire.codec.varint import encode_varint


def sized(data: bytes) -> bytes:
    """Bytes with their length in front."""
    return encode_varint(len(data)) + data


OUT_OF_RANGE: list[tuple[Any, str]] = [
    (wire.StoppingCriteria(max_new_tokens=-1), "StoppingCriteria.max_new_tokens: -1 is not within 0 to 4294967295"),
    (wire.StoppingCriteria(max_new_tokens=1 << 32), "StoppingCriteria.max_new_tokens: 4294967296 is not within"),
    (wire.ServerInfo(total_kv_blocks=1 << 64), "ServerInfo.total_kv_blocks: 18446744073709551616 is not within"),
    (wire.ServerInfo(total_kv_blocks=-1), "ServerInfo.total_kv_blocks: -1 is not within"),
    (wire.GenerateRequest(priority=1 << 31), "GenerateRequest.priority: 2147483648 is not within -2147483648 to"),
    (wire.GenerateRequest(priority=-(1 << 31) - 1), "GenerateRequest.priority: -2147483649 is not within"),
    (wire.RandomSampling(seed=1 << 63), "RandomSampling.seed: 9223372036854775808 is not within"),
    (wire.RandomSampling(top_p=1e39), "RandomSampling.top_p: 1e+39 does not fit into a float of 32 bits"),
    (wire.DecodingParameters(presence_penalty=1e39), "DecodingParameters.presence_penalty: 1e+39 does not fit"),
    (wire.Value(number_value=10**400), "Value.number_value:"),
    (wire.TokenIds(ids=[1, -1]), "TokenIds.ids[1]: -1 is not within"),
    (wire.TokenIds(ids=[1 << 32]), "TokenIds.ids[0]: 4294967296 is not within"),
    (wire.TokenIds(ids=[*range(2000), 1 << 32]), "TokenIds.ids[2000]: 4294967296 is not within"),
    (wire.SequenceOutput(logprobs=[0.0, 1e39]), "SequenceOutput.logprobs[1]: 1e+39 does not fit"),
    (wire.DecodingParameters(logit_bias={-1: 1.0}), "DecodingParameters.logit_bias key: -1 is not within"),
    (wire.DecodingParameters(logit_bias={1: 1e39}), "DecodingParameters.logit_bias value: 1e+39 does not fit"),
    (wire.PauseGenerationRequest(mode=1 << 31), "PauseGenerationRequest.mode: 2147483648 is not within"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("message", "expected"), OUT_OF_RANGE, ids=[text.split(":")[0] for _, text in OUT_OF_RANGE])
def test_values_out_of_range_are_refused(message: Any, expected: str) -> None:
    """A value that the type cannot carry is refused, never cut; the error names message, field and range."""
    with pytest.raises(EncodeError) as refused:
        encode(message)
    assert str(refused.value).startswith(expected)


WRONG_TYPES: list[tuple[type[Any], str, object, str]] = [
    (wire.StoppingCriteria, "max_new_tokens", "5", "int expected, not str"),
    (wire.StoppingCriteria, "max_new_tokens", 5.0, "int expected, not float"),
    (wire.StoppingCriteria, "max_new_tokens", None, "int expected, not NoneType"),
    (wire.StoppingCriteria, "max_new_tokens", True, "int expected, not bool"),
    (wire.StoppingCriteria, "max_new_tokens", "", "int expected, not str"),
    (wire.StoppingCriteria, "thinking_token_budget", "5", "int expected, not str"),
    (wire.StoppingCriteria, "ignore_eos", 1, "bool expected, not int"),
    (wire.StoppingCriteria, "ignore_eos", None, "bool expected, not NoneType"),
    (wire.StoppingCriteria, "stop_strings", "stop", "list expected, not str"),
    (wire.StoppingCriteria, "stop_strings", None, "list expected, not NoneType"),
    (wire.StoppingCriteria, "stop_token_ids", {5}, "list expected, not set"),
    (wire.GenerateRequest, "request_id", b"r", "str expected, not bytes"),
    (wire.GenerateRequest, "request_id", None, "str expected, not NoneType"),
    (wire.GenerateRequest, "request_id", 0, "str expected, not int"),
    (wire.GenerateRequest, "text", b"", "str expected, not bytes"),
    (wire.GenerateRequest, "temperature", "0.5", "float expected, not str"),
    (wire.GenerateRequest, "temperature", True, "float expected, not bool"),
    (wire.GenerateRequest, "sampling", wire.StoppingCriteria(), "RandomSampling expected, not StoppingCriteria"),
    (wire.GenerateRequest, "sampling", {}, "RandomSampling expected, not dict"),
    (wire.DecodingParameters, "presence_penalty", None, "float expected, not NoneType"),
    (wire.DecodingParameters, "presence_penalty", "", "float expected, not str"),
    (wire.DecodingParameters, "logit_bias", [], "dict expected, not list"),
    (wire.DecodingParameters, "logit_bias", None, "dict expected, not NoneType"),
    (wire.MediaItem, "raw_bytes", "text", "bytes expected, not str"),
    (wire.UpdateWeightsRequest, "update_info_json", None, "bytes expected, not NoneType"),
    (wire.UpdateWeightsRequest, "update_info_json", "", "bytes expected, not str"),
    (wire.MediaItem, "modality", "image", "int expected, not str"),
    (wire.MediaItem, "modality", None, "int expected, not NoneType"),
]


@pytest.mark.parametrize(
    ("message_class", "name", "value", "reason"),
    WRONG_TYPES,
    ids=[f"{entry[1]}-{type(entry[2]).__name__}" for entry in WRONG_TYPES],
)
def test_values_of_the_wrong_type_are_refused(message_class: type[Any], name: str, value: object, reason: str) -> None:
    """A wrong Python type is refused even where it happens to be false, like the default."""
    with pytest.raises(EncodeError) as refused:
        encode(message_class(**{name: value}))
    assert f"{message_class.__name__}.{name}: {reason}" == str(refused.value)


ELEMENTS: list[tuple[Any, str]] = [
    (wire.TokenIds(ids=["5"]), "TokenIds.ids[0]: int expected, not str"),  # type: ignore[list-item]
    (wire.TokenIds(ids=[1, 2, None]), "TokenIds.ids[2]: int expected, not NoneType"),  # type: ignore[list-item]
    (wire.TokenIds(ids=[1, 2.0]), "TokenIds.ids[1]: int expected, not float"),  # type: ignore[list-item]
    (wire.TokenIds(ids=[1, True]), "TokenIds.ids[1]: int expected, not bool"),
    (wire.SequenceOutput(logprobs=[None]), "SequenceOutput.logprobs[0]: float expected, not NoneType"),  # type: ignore[list-item]
    (wire.SequenceOutput(logprobs=[0.5, "x"]), "SequenceOutput.logprobs[1]: float expected, not str"),  # type: ignore[list-item]
    (
        wire.PreprocessedMediaFeatures(is_embed=[True, 1]),  # type: ignore[list-item]
        "PreprocessedMediaFeatures.is_embed[1]: bool expected, not int",
    ),
    (wire.AbortRequest(request_ids=["a", b"b"]), "AbortRequest.request_ids[1]: str expected, not bytes"),  # type: ignore[list-item]
    (wire.GenerateRequest(media=[None]), "GenerateRequest.media[0]: MediaItem expected, not NoneType"),  # type: ignore[list-item]
    (wire.Struct(fields={"k": None}), "Struct.fields value: Value expected, not NoneType"),  # type: ignore[dict-item]
    (wire.Struct(fields={5: wire.Value()}), "Struct.fields key: str expected, not int"),  # type: ignore[dict-item]
    (wire.Struct(fields={"k": wire.Value(), 5: wire.Value()}), "Struct.fields key: str expected, not int"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("message", "expected"), ELEMENTS, ids=[text.split(":")[0] for _, text in ELEMENTS])
def test_elements_of_the_wrong_type_are_named_by_their_place(message: Any, expected: str) -> None:
    """A wrong element is refused, and the error says which one it is."""
    with pytest.raises(EncodeError) as refused:
        encode(message)
    assert expected == str(refused.value)


@pytest.mark.parametrize(
    "message", [wire.GenerateRequest(text="ab\ud800"), wire.AbortRequest(request_ids=["ab\ud800"])]
)
def test_lone_surrogates_are_refused(message: Any) -> None:
    """The error gives the place of the character, and nothing of the text."""
    with pytest.raises(EncodeError, match="the character at index 2 is a lone surrogate") as refused:
        encode(message)
    assert "ab" not in str(refused.value)


def test_two_members_of_a_oneof_are_refused() -> None:
    """A message that says two things at once is refused, since a reader would see the last one only."""
    with pytest.raises(EncodeError, match=r"GenerateRequest\.prompt: more than one member of the oneof is set"):
        encode(wire.GenerateRequest(text="", token_ids=wire.TokenIds()))


def test_numbers_of_other_types_are_converted() -> None:
    """What is an integer or a float by Python's protocols is accepted: foreign integers, ints as floats, tuples."""

    class Index:
        def __index__(self) -> int:
            return 70_000

    foreign: Any = Index()
    assert encode(wire.TokenIds(ids=[70_000, 1])) == encode(wire.TokenIds(ids=[foreign, 1]))
    assert encode(wire.TokenIds(ids=[1, 2])) == encode(wire.TokenIds(ids=(1, 2)))  # type: ignore[arg-type]
    assert encode(wire.SleepRequest(level=70_000)) == encode(wire.SleepRequest(level=foreign))
    assert encode(wire.GenerateRequest(temperature=1.0)) == encode(wire.GenerateRequest(temperature=1))
    assert encode(wire.SequenceOutput(logprobs=[1.0, 2.0])) == encode(wire.SequenceOutput(logprobs=[1, 2.0]))
    buffer: Any = bytearray(b"a")
    assert encode(wire.MediaItem(raw_bytes=b"a")) == encode(wire.MediaItem(raw_bytes=buffer))


def test_infinity_and_nan_are_floats() -> None:
    """They are not out of range; where JSON has no such number, the Struct conversion refuses them."""
    read = decode(wire.SequenceOutput, encode(wire.SequenceOutput(logprobs=[math.inf, -math.inf, math.nan])))
    assert "[inf, -inf, nan]" == repr(read.logprobs)


def _nested_value(levels: int) -> wire.Value:
    value = wire.Value()
    for _ in range(levels):
        value = wire.Value(list_value=wire.ListValue(values=[value]))
    return value


def _nested_bytes(levels: int) -> bytes:
    data = b""
    for _ in range(levels):
        data = b"\x32" + sized(b"\x0a" + sized(data))
    return data


def test_depth_is_limited_in_both_directions() -> None:
    """A hundred messages inside the outermost are the limit, as in google protobuf; a cycle is refused too."""
    assert _nested_bytes(50) == encode(_nested_value(50))
    assert _nested_value(50) == decode(wire.Value, _nested_bytes(50))
    with pytest.raises(EncodeError, match="messages are nested too deeply"):
        encode(_nested_value(51))
    with pytest.raises(DecodeError, match="messages are nested too deeply"):
        decode(wire.Value, _nested_bytes(51))
    circle = wire.ListValue()
    circle.values.append(wire.Value(list_value=circle))
    with pytest.raises(EncodeError, match="messages are nested too deeply"):
        encode(circle)


def test_depth_limit_is_that_of_google(contract: Any) -> None:
    """The deepest message that google reads is the deepest that the codec reads."""
    google = contract.google(wire.Value)
    google.FromString(_nested_bytes(50))
    with pytest.raises(Exception, match="parsing"):
        google.FromString(_nested_bytes(51))


BROKEN: list[tuple[type[Any], bytes, str]] = [
    (wire.GenerateRequest, b"\x1a\x05abc", "GenerateRequest.text: the data ends inside a value"),
    (wire.GenerateRequest, b"\x1a", "GenerateRequest.text: the data ends inside a value"),
    (wire.GenerateRequest, b"\x58", "GenerateRequest.truncate_prompt_tokens: the data ends inside a value"),
    (wire.GenerateRequest, b"\x58\x80", "GenerateRequest.truncate_prompt_tokens: the data ends inside a value"),
    (wire.GenerateRequest, b"\x2d\x00\x00", "GenerateRequest.temperature: the data ends inside a value"),
    (wire.GenerateRequest, b"\x80", "GenerateRequest: the data ends inside a tag"),
    (wire.GenerateRequest, b"\x1a\x02\xc3\x28", "GenerateRequest.text: byte 0 of the text is not UTF-8"),
    (wire.GenerateRequest, b"\x1a\x03\xed\xa0\x80", "GenerateRequest.text: byte 0 of the text is not UTF-8"),
    (wire.AbortRequest, b"\x0a\x01\xff", "AbortRequest.request_ids: byte 0 of the text is not UTF-8"),
    (wire.Struct, b"\x0a\x03\x0a\x01\xff", "Struct.fields key: byte 0 of the text is not UTF-8"),
    (wire.GenerateRequest, b"\x58" + b"\xff" * 10 + b"\x01", "more than ten bytes"),
    (wire.GenerateRequest, b"\x1a" + b"\x80" * 5 + b"\x00", "GenerateRequest.text: a length is too large"),
    (wire.GenerateRequest, b"\xff\xff\xff\xff\x7f", "GenerateRequest: a tag is too large"),
    (wire.GenerateRequest, b"\x00\x01", "GenerateRequest: 0 is not a field number"),
    (wire.GenerateRequest, b"\x0e\x01", "6 is not a wire type"),
    (wire.GenerateRequest, b"\x0f\x01", "7 is not a wire type"),
    (wire.GenerateRequest, b"\x0c", "a group ends that was not open"),
    (wire.GenerateRequest, b"\x0b\x08\x01", "the data ends inside a value"),
    (wire.GenerateRequest, b"\x0b\x14", "a group ends that was not open"),
    (wire.GenerateRequest, b"\x0b" * 200 + b"\x0c" * 200, "groups are nested too deeply"),
    (wire.SequenceOutput, b"\x2a\x03\x00\x00\x00", "SequenceOutput.logprobs: the data ends inside a value"),
    (wire.SequenceOutput, b"\x22\x01\x80", "SequenceOutput.token_ids: a packed list ends inside a value"),
    (wire.PreprocessedMediaFeatures, b"\x32\x01\x80\x01", "PreprocessedMediaFeatures.is_embed: the data ends inside"),
    (wire.GenerateRequest, b"\x22\x03\x0a\x02\x01", "the data ends inside a value"),
]


@pytest.mark.parametrize(("message_class", "data", "reason"), BROKEN, ids=[data.hex()[:20] for _, data, _ in BROKEN])
def test_malformed_data_is_refused(message_class: type[Any], data: bytes, reason: str, contract: Any) -> None:
    """Each way to break the encoding gives a DecodeError that names message and field; google refuses it too."""
    with pytest.raises(DecodeError) as refused:
        decode(message_class, data)
    assert reason in str(refused.value)
    with pytest.raises(Exception, match="parsing"):
        contract.google(message_class).FromString(data)


def test_a_field_may_not_reach_beyond_its_message() -> None:
    """A value that ends in the data around its message is refused, though the bytes are there."""
    inside = b"\x32\x02\x15\x00" + b"\x00\x00\x00\x12\x01m"
    with pytest.raises(DecodeError, match="RandomSampling"):
        decode(wire.GenerateRequest, inside)
