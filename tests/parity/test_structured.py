"""Constrained output on both servers, both with the one backend that vllm-rs 0.32.0 can be made to use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.deviations import deviation
from support.parity import request

if TYPE_CHECKING:
    from support.parity import Pair

HELLO = "Hello"
BAD = "INVALID_ARGUMENT"
RESPONSE = {"output_token_ids": True, "output_logprobs": True}
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]}


def asked(decoding: dict[str, Any]) -> Any:
    """A constrained request."""
    return request(HELLO, stopping={"max_new_tokens": 30}, response=RESPONSE, decoding=decoding)


@pytest.mark.parametrize(
    ("decoding", "text"),
    [
        ({"json": json.dumps(PERSON)}, None),
        ({"json": "{}"}, "false"),
        ({"json": '{"type": "string", "minLength": 2, "maxLength": 4}'}, None),
        ({"json": '{"type": "string", "format": "email"}'}, None),
        ({"json": '{"type": "integer", "multipleOf": 3}'}, None),
        ({"json": '{"items":' * 60 + "{}" + "}" * 60}, None),
        ({"json_object": True}, None),
        ({"regex": "[0-9]{3}"}, None),
        ({"regex": ""}, ""),
        ({"choice": {"choices": ["yes", "no"]}}, None),
        ({"choice": {"choices": ["a", "a"]}}, "a"),
        ({"choice": {"choices": [""]}}, ""),
        ({"choice": {"choices": ['a"b\\c\n']}}, 'a"b\\c\n'),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
        ({"grammar": 'start: "a" "b"'}, "ab"),
        ({"structural_tag": json.dumps(TAG)}, None),
    ],
    ids=lambda value: str(value)[:45] if isinstance(value, dict) else "",
)
def test_constraint(both: Pair, decoding: dict[str, Any], text: str | None) -> None:
    """The same tokens satisfy it."""
    answer = both.agree(asked(decoding))
    if text is not None:
        assert (text, "STOP") == (answer.said["text"], answer.end[0])


def test_no_constraint(both: Pair) -> None:
    """A constraint that is switched off is none."""
    assert both.agree(asked({})).comparable == both.agree(asked({"json_object": False})).comparable


@pytest.mark.parametrize(
    "decoding",
    [
        {"json": ""},
        {"json": "{"},
        {"json": '"x"'},
        {"json": "[" * 500 + "]" * 500},
        {"json": '{"items":' * 300 + "{}" + "}" * 300},
        {"choice": {"choices": []}},
        {"grammar": ""},
        {"grammar": " "},
        {"structural_tag": ""},
    ],
    ids=lambda decoding: str(decoding)[:40],
)
def test_refused(both: Pair, decoding: dict[str, Any]) -> None:
    """What can be no constraint is refused before the answer begins."""
    both.refuse(asked(decoding), BAD)


@pytest.mark.parametrize(
    "decoding",
    [
        {"json": '{"type": "nonsense"}'},
        {"json": '{"type": "array", "uniqueItems": true}'},
        {"json": '{"$ref": "#/nowhere"}'},
        {"regex": "[0-9"},
        {"regex": "(?=a)b"},
        {"regex": "a\0b"},
    ],
    ids=lambda decoding: str(decoding)[:40],
)
def test_what_cannot_be_enforced(both: Pair, decoding: dict[str, Any]) -> None:
    """We refuse it; vllm-rs 0.32.0 answers as if it were nothing, or not at all."""
    deviation("constraint-not-enforced")
    assert [BAD, BAD] == [both.ours.unary(asked(decoding)).code, both.ours.stream(asked(decoding)).code]
    assert "OK" == both.theirs.unary(asked(decoding)).code


@pytest.mark.parametrize(
    "decoding",
    [
        {"grammar": 'root ::= "a'},
        {"grammar": 'x ::= "a"'},
        {"grammar": "root ::= nowhere"},
        {"structural_tag": "x"},
        {"structural_tag": "{}"},
        {"structural_tag": "[]"},
    ],
    ids=str,
)
def test_what_does_not_compile(both: Pair, decoding: dict[str, Any]) -> None:
    """We refuse it before the answer begins; vllm-rs 0.32.0 submits it and its engine fails the request."""
    deviation("constraint-not-compiled")
    assert [BAD, BAD] == [both.ours.unary(asked(decoding)).code, both.ours.stream(asked(decoding)).code]
    assert ["INTERNAL", "INTERNAL"] == [
        both.theirs.unary(asked(decoding)).code,
        both.theirs.stream(asked(decoding)).code,
    ]


@pytest.mark.parametrize("schema", ["true", "5", "[]"])
def test_a_schema_that_is_no_object(both: Pair, schema: str) -> None:
    """We refuse it. It ends the engine of vllm-rs 0.32.0, which therefore is not asked."""
    deviation("schema-no-object")
    answer = both.ours.stream(asked({"json": schema}))
    assert (BAD, None) == (answer.code, answer.prompt)
    assert "OK" == both.ours.unary(request(HELLO, stopping={"max_new_tokens": 2})).code
