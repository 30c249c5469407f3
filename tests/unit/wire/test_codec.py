"""The codec against google protobuf, and what it reads beyond the plain case."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from support import random_messages
from trio_sidecar import wire
from trio_sidecar.wire.codec import DecodeError, EncodeError, decode, encode, generated_source, prepare
from trio_sidecar.wire.codec.varint import encode_varint

if TYPE_CHECKING:
    from collections.abc import Callable

    import betterproto2

ROUNDS = 30
"""Messages of each of the 70 classes in each direction."""


def sized(data: bytes) -> bytes:
    """Bytes with their length in front."""
    return encode_varint(len(data)) + data


def field(number: int, wire_type: int, value: bytes) -> bytes:
    """One field on the wire; the value brings its own length."""
    return encode_varint(number << 3 | wire_type) + value


def test_random_messages_of_ours_are_written_as_google_writes_them(contract: Any) -> None:
    """At least 2,000 of our messages have the bytes that google gives them, and google reads every field alike."""
    count = 0
    for ours, google in contract.pairs:
        for _ in range(ROUNDS):
            message = random_messages.random_message(ours)
            data = encode(message)
            read = google.FromString(data)
            assert [] == random_messages.differences(message, read)
            assert random_messages.google_bytes(read) == data
            count += 1
    assert count >= 2000


def test_random_messages_of_google_are_read_as_google_reads_them(contract: Any) -> None:
    """At least 2,000 messages that google wrote, in any order of map entries, are read alike and written back alike."""
    count = 0
    for ours, google in contract.pairs:
        for _ in range(ROUNDS):
            original = google.FromString(encode(random_messages.random_message(ours)))
            message = decode(ours, original.SerializeToString())
            assert [] == random_messages.differences(message, original)
            assert random_messages.google_bytes(original) == encode(message)
            count += 1
    assert count >= 2000


def test_truncated_messages_are_refused_where_google_refuses_them(contract: Any) -> None:
    """Cut after each byte, a message is refused or read exactly as google refuses or reads it."""
    refused = 0
    for ours, google in contract.pairs:
        for _ in range(4):
            data = encode(random_messages.random_message(ours, 2))
            for stop in range(min(len(data), 150)):
                refused += _agree(ours, google, data[:stop])
    assert refused > 500


def test_mutated_messages_are_refused_where_google_refuses_them(contract: Any) -> None:
    """Changed bytes give a message or a DecodeError, as google has it, and never another exception."""
    refused = 0
    for ours, google in contract.pairs:
        for _ in range(60):
            data = bytearray(encode(random_messages.random_message(ours, 3)))
            for _ in range(random.randint(1, 3)):
                place = random.randrange(len(data) + 1)
                data[place : place + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
            refused += _agree(ours, google, bytes(data))
    assert refused > 200


def test_noise_gives_nothing_but_decode_errors(contract: Any) -> None:
    """Random bytes give a message or a DecodeError, as google has it."""
    for ours, google in contract.pairs:
        for _ in range(40):
            _agree(ours, google, random.randbytes(random.randint(1, 40)))


def _agree(ours: type[Any], google: type[Any], data: bytes) -> bool:
    """Check that both sides refuse the data or read the same; returns whether they refused.

    Two habits of google's are not ours: it does not mind field number 0 in a message without fields, or in an unknown
    group, and it drops a map entry from the map if the entry holds unknown fields.
    """
    try:
        read = google.FromString(data)
    except Exception:  # noqa: BLE001 - google's DecodeError, of whatever class this version has
        with pytest.raises(DecodeError):
            decode(ours, data)
        return True
    try:
        message = decode(ours, data)
    except DecodeError as refused:
        if refused.reason != "0 is not a field number":
            raise
        return True
    if not random_messages.holds_map(ours):
        assert [] == random_messages.differences(message, read)
        # A signalling NaN becomes a quiet one on its way through a Python float.
        assert random_messages.google_bytes(read) == encode(message) or "nan" in str(read)
    return False


def _json_value(value: Any) -> wire.Value:
    """A Struct's value, made by hand."""
    if value is None:
        return wire.Value(null_value=wire.NullValue.NULL_VALUE)
    if isinstance(value, bool):
        return wire.Value(bool_value=value)
    if isinstance(value, float):
        return wire.Value(number_value=value)
    if isinstance(value, str):
        return wire.Value(string_value=value)
    if isinstance(value, list):
        return wire.Value(list_value=wire.ListValue(values=[_json_value(item) for item in value]))
    return wire.Value(struct_value=wire.Struct(fields={key: _json_value(item) for key, item in value.items()}))


def test_struct_is_written_as_google_writes_it(contract: Any) -> None:
    """A nested Struct has google's bytes, sorted by key, and comes back the same; zero and null stay apart."""
    document = {"b": [1.0, None, True, "x"], "a": {"zero": 0.0, "minus": -0.0, "empty": {}, "none": None}, "": ""}
    message = wire.EngineReasoningGate(chat_template_kwargs=_json_value(document).struct_value)
    data = encode(message)
    google = contract.google(wire.EngineReasoningGate).FromString(data)
    assert random_messages.google_bytes(google) == data
    assert message == decode(wire.EngineReasoningGate, data)
    inner = decode(wire.EngineReasoningGate, data).chat_template_kwargs
    assert inner is not None
    assert ["", "a", "b"] == list(inner.fields)


def test_negative_zero_is_kept_and_positive_zero_left_out() -> None:
    """-0.0 is not the default: it is written, with implicit presence too."""
    assert b"" == encode(wire.DecodingParameters(presence_penalty=0.0))
    data = encode(wire.DecodingParameters(presence_penalty=-0.0))
    assert b"\x0d\x00\x00\x00\x80" == data
    assert math.copysign(1, decode(wire.DecodingParameters, data).presence_penalty) == -1.0


def test_presence_of_zero_values() -> None:
    """Optional fields and members of a oneof are written even if they hold the default; implicit ones are not."""
    assert b"" == encode(wire.GenerateRequest(priority=0, request_id="", truncate_prompt_tokens=0))
    assert b"\x2d\x00\x00\x00\x00" == encode(wire.GenerateRequest(temperature=0.0))
    assert b"\x1a\x00" == encode(wire.GenerateRequest(text=""))
    assert b"\x32\x00" == encode(wire.GenerateRequest(sampling=wire.RandomSampling()))
    assert "" == decode(wire.GenerateRequest, b"\x1a\x00").text
    assert decode(wire.GenerateRequest, b"").text is None


@pytest.mark.parametrize("layout", ["packed", "single", "mixed", "two runs"])
def test_repeated_scalars_are_read_packed_and_unpacked(layout: str) -> None:
    """Ids, floats and flags are read however a writer laid them out."""
    data = {
        "packed": field(4, 2, sized(b"\x01\x80\x02")),
        "single": field(4, 0, b"\x01") + field(4, 0, b"\x80\x02"),
        "mixed": field(4, 0, b"\x01") + field(4, 2, sized(b"\x80\x02")),
        "two runs": field(4, 2, sized(b"\x01")) + field(4, 2, sized(b"")) + field(4, 2, sized(b"\x80\x02")),
    }[layout]
    assert [1, 256] == decode(wire.SequenceOutput, data).token_ids


def test_a_sub_message_that_occurs_twice_is_merged() -> None:
    """Singular fields take the last value, lists are joined, absent ones stay."""
    first = wire.StoppingCriteria(max_new_tokens=5, stop_token_ids=[1], thinking_token_budget=0)
    second = wire.StoppingCriteria(max_new_tokens=6, stop_token_ids=[2])
    data = encode(wire.GenerateRequest(stopping=first)) + encode(wire.GenerateRequest(stopping=second))
    merged = decode(wire.GenerateRequest, data).stopping
    assert wire.StoppingCriteria(max_new_tokens=6, stop_token_ids=[1, 2], thinking_token_budget=0) == merged


def test_the_last_member_of_a_oneof_wins() -> None:
    """An earlier member is forgotten, and a message member does not come back when it is set again."""
    text = encode(wire.GenerateRequest(text="t"))
    ids = [encode(wire.GenerateRequest(token_ids=wire.TokenIds(ids=[value]))) for value in (1, 2)]
    assert wire.GenerateRequest(text="t") == decode(wire.GenerateRequest, ids[0] + text)
    assert wire.GenerateRequest(token_ids=wire.TokenIds(ids=[2])) == decode(
        wire.GenerateRequest, ids[0] + text + ids[1]
    )
    assert wire.GenerateRequest(token_ids=wire.TokenIds(ids=[1, 2])) == decode(wire.GenerateRequest, ids[0] + ids[1])


def test_map_entries_may_lack_key_or_value() -> None:
    """An entry without key or value has the default one; the last entry of a key wins."""
    assert {0: 0.0} == decode(wire.DecodingParameters, field(4, 2, sized(b""))).logit_bias
    fields = decode(wire.Struct, field(1, 2, sized(b"\x0a\x01k"))).fields
    assert {"k": wire.Value()} == fields
    twice = encode(wire.DecodingParameters(logit_bias={7: 1.0})) + encode(wire.DecodingParameters(logit_bias={7: 2.0}))
    assert {7: 2.0} == decode(wire.DecodingParameters, twice).logit_bias


def test_unknown_fields_of_a_map_entry_are_skipped() -> None:
    """An entry has no place to keep them in; its key and value still count."""
    entry = field(1, 0, b"\x07") + field(9, 0, b"\x01") + field(2, 5, b"\x00\x00\x80\x3f")
    assert {7: 1.0} == decode(wire.DecodingParameters, field(4, 2, sized(entry))).logit_bias


def test_a_number_too_small_for_the_type_is_absent() -> None:
    """What becomes zero as a float of 32 bits is left out, as google leaves it out."""
    assert b"" == encode(wire.DecodingParameters(presence_penalty=1e-60))


def test_unknown_enum_values_are_kept() -> None:
    """A finish reason that this version does not know survives, as a number."""
    data = field(2, 0, b"\x09")
    message = decode(wire.FinishInfo, data)
    assert 9 == message.finish_reason
    assert data == encode(message)
    assert wire.FinishInfoFinishReason.STOP is decode(wire.FinishInfo, field(2, 0, b"\x02")).finish_reason


@pytest.mark.parametrize(
    "unknown",
    [
        field(100, 0, b"\x80\x01"),
        field(100, 1, b"8 bytes!"),
        field(100, 2, sized(b"text")),
        field(100, 5, b"four"),
        field(100, 3, field(1, 0, b"\x01") + field(2, 3, field(2, 4, b"")) + field(100, 4, b"")),
    ],
    ids=["varint", "fixed64", "length", "fixed32", "group"],
)
def test_unknown_fields_are_kept(unknown: bytes) -> None:
    """A field from a newer contract is never fatal; it is written again, after the known ones."""
    known = encode(wire.TokenIds(ids=[1]))
    assert known + unknown == encode(decode(wire.TokenIds, unknown + known))
    nested = field(2, 2, sized(field(1, 2, sized(unknown))))
    assert nested == encode(decode(wire.CandidateTokens, nested))


def test_a_known_number_with_another_wire_type_is_unknown() -> None:
    """The former bytes field 16 is kept as unknown, and ``watermarking`` stays absent."""
    data = field(16, 2, sized(b'{"a": 1}'))
    message = decode(wire.GenerateRequest, data)
    assert message.watermarking is None
    assert data == encode(message)


def test_unknown_fields_of_merged_messages_are_joined() -> None:
    """Both occurrences' unknown fields are kept."""
    one, two = field(90, 0, b"\x01"), field(91, 0, b"\x02")
    data = field(6, 2, sized(one)) + field(6, 2, sized(two))
    assert field(6, 2, sized(one + two)) == encode(decode(wire.GenerateRequest, data))


@pytest.mark.parametrize(
    ("name", "decode_hostile"),
    [
        ("unknown fields", lambda: decode(wire.TokenIds, field(100, 0, b"\x01") * 200_000)),
        ("merged messages", lambda: decode(wire.GenerateRequest, field(6, 2, sized(field(90, 0, b"\x01"))) * 100_000)),
        ("single values", lambda: decode(wire.TokenIds, field(1, 0, b"\x01") * 200_000)),
        ("small runs", lambda: decode(wire.TokenIds, field(1, 2, b"\x01\x01") * 200_000)),
    ],
)
@pytest.mark.timeout(10)
def test_hostile_messages_take_time_in_proportion_to_their_size(
    name: str, decode_hostile: Callable[[], betterproto2.Message]
) -> None:
    """Hundreds of thousands of tiny pieces are read within the test's ceiling, not in quadratic time."""
    assert decode_hostile() is not None, name


def test_bytes_like_data_is_read() -> None:
    """A bytearray or memoryview gives a message that does not refer to it."""
    data = bytearray(encode(wire.MediaItem(raw_bytes=b"abc")))
    view: Any = memoryview(data)
    message = decode(wire.MediaItem, view)
    data[:] = bytes(len(data))
    assert b"abc" == message.raw_bytes
    assert type(message.raw_bytes) is bytes


def test_messages_are_ordinary_dataclass_instances() -> None:
    """A decoded message equals a constructed one, has its own lists, and may be changed and written again."""
    one, other = decode(wire.SequenceOutput, b""), decode(wire.SequenceOutput, b"")
    one.token_ids.append(5)
    assert [] == other.token_ids
    assert wire.SequenceOutput(token_ids=[5]) == one
    assert repr(wire.SequenceOutput(token_ids=[5])) == repr(one)
    assert bytes(one) == encode(one)


def test_only_message_classes_are_accepted() -> None:
    """Anything else is a programmer's error."""
    with pytest.raises(TypeError, match="generated message class"):
        decode(dict, b"")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="generated message class"):
        encode("text")  # type: ignore[arg-type]


def test_prepare_and_generated_source() -> None:
    """A class can be compiled ahead of time, and its source can be read."""
    prepare(wire.PromptInfo)
    assert "def decode_PromptInfo(" in generated_source(wire.PromptInfo)
    assert "def encode_PromptInfo(" in generated_source(wire.PromptInfo)


def test_errors_name_message_and_field() -> None:
    """The innermost message is named, as attributes and in the text."""
    with pytest.raises(
        EncodeError, match=r"RandomSampling\.top_k: 4294967296 is not within 0 to 4294967295"
    ) as refused:
        encode(wire.GenerateRequest(sampling=wire.RandomSampling(top_k=1 << 32)))
    assert ("RandomSampling", "top_k") == (refused.value.message, refused.value.field)
    with pytest.raises(DecodeError, match=r"TokenIds\.ids: the data ends inside a value") as broken:
        decode(wire.GenerateRequest, field(4, 2, sized(field(1, 2, b"\x05\x01"))))
    assert ("TokenIds", "ids") == (broken.value.message, broken.value.field)
    assert isinstance(broken.value, ValueError)


@pytest.mark.parametrize(
    ("packed", "ids"),
    [
        (b"\x80\x80\x01", [1 << 14]),
        (b"\xff\xff\x7f", [(1 << 21) - 1]),
        (b"\x81\x80\x00", [1]),
        (b"\x01\x02\x03", [1, 2, 3]),
        (b"\x80\x01\x05", [128, 5]),
        (b"\x05\x80\x01", [5, 128]),
    ],
)
def test_three_packed_bytes_are_read_as_what_they_are(packed: bytes, ids: list[int]) -> None:
    """Three bytes, the usual size of one token id, are one value or several, whatever their shape."""
    message = decode(wire.SequenceOutput, b'"\x03' + packed)
    assert ids == message.token_ids
