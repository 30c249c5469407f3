from __future__ import annotations

import math
from typing import Any

import pytest

from support.conversion import refused, shown, wire
from support.samples import minimal_request
from trio_sidecar.wire import DecodingParameters, DecodingParametersStringChoices


def guided(**guide: Any) -> dict[str, Any]:
    return minimal_request(sampling={"guided_decoding": guide})


@pytest.mark.rule("7.6", "FR-070")
@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (
            {"json": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
            {"json": '{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]}'},
        ),
        ({"json": {"z": 1, "a": "é"}}, {"json": '{"z":1,"a":"é"}'}),
        ({"json": {}}, {"json": "{}"}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"grammar": "root ::= 'yes'"}, {"grammar": "root ::= 'yes'"}),
        ({"choice": ["yes", "no"]}, {"choice": DecodingParametersStringChoices(choices=["yes", "no"])}),
        ({"choice": []}, {"choice": DecodingParametersStringChoices()}),
        ({"structural_tag": "<answer>"}, {"structural_tag": "<answer>"}),
        ({"structural_tag": {"tag": "answer"}}, {"structural_tag": '{"tag":"answer"}'}),
    ],
    ids=shown,
)
def test_each_guide_sets_its_own_field(guide: dict[str, Any], expected: dict[str, Any]) -> None:
    """A guide arrives in its own arm, JSON compact with the keys in the order given; the other guides may be None."""
    absent = dict.fromkeys(("json", "regex", "choice", "grammar", "structural_tag", "backend", "whitespace_pattern"))
    assert DecodingParameters(**expected) == wire(guided(**{**absent, **guide})).decoding


@pytest.mark.rule("R7.14")
@pytest.mark.parametrize("guide", [None, {}, {"json": None, "backend": None}])
def test_no_guide_is_no_structured_output(guide: object) -> None:
    """A guide object with nothing in it asks for nothing."""
    assert DecodingParameters() == wire(minimal_request(sampling={"guided_decoding": guide})).decoding


@pytest.mark.rule("R7.12", "R7.13")
@pytest.mark.parametrize(
    ("guide", "named"),
    [
        ({"backend": "xgrammar"}, "guided_decoding.backend is not supported"),
        ({"whitespace_pattern": " *"}, "guided_decoding.whitespace_pattern is not supported"),
        ({"json": {}, "regex": ".*"}, "guided_decoding must hold only one guide, got json and regex"),
        ({"regex": 1}, "guided_decoding.regex must be a string, got 1"),
        ({"choice": "yes"}, "guided_decoding.choice must be an array"),
        ({"choice": ["yes", 1]}, "guided_decoding.choice[1] must be a string"),
        (
            {"json": {"minimum": math.nan}},
            "guided_decoding.json must be a JSON value, got an object that JSON cannot carry: Out of range float",
        ),
        ({"json": {"x": {1}}}, "guided_decoding.json must be a JSON value"),
        ({"structural_tag": {"x": math.nan}}, "guided_decoding.structural_tag must be a JSON value"),
        ({"json": "\ud800"}, "guided_decoding.json must be valid Unicode"),
        ({"structural_tag": "\ud800"}, "guided_decoding.structural_tag must be valid Unicode"),
    ],
    ids=shown,
)
def test_refused_guides(guide: dict[str, Any], named: str) -> None:
    """Settings that the wire has no place for, two guides at once and malformed guides are refused by name."""
    assert named in refused(guided(**guide))


def test_a_guide_must_be_an_object() -> None:
    """The guide options themselves must be an object."""
    assert "guided_decoding must be a JSON object" in refused(minimal_request(sampling={"guided_decoding": "json"}))
