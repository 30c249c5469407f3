"""What of a trace context goes on: what is well-formed, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traces import PARENT, SPAN_ID, TRACE_ID
from trio_sidecar.tracing import passed_on, with_trace


def test_both_headers_go_on_and_no_others() -> None:
    """Of all headers of a request only the two of the standard go on, as they came."""
    headers = {"traceparent": PARENT, "tracestate": "a=b, c=d", "x-request-id": "1", "baggage": "secret=1"}
    assert {"traceparent": PARENT, "tracestate": "a=b, c=d"} == passed_on(headers)
    assert {"traceparent": PARENT} == passed_on({"traceparent": PARENT})


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "a=b"}, {"Traceparent": PARENT}])
def test_without_a_parent_there_is_nothing(headers: dict[str, str] | None) -> None:
    """A state without a parent means nothing."""
    assert {} == passed_on(headers)


MALFORMED = {
    "empty": "",
    "text": "garbage",
    "upper case": PARENT.upper(),
    "no trace": f"00-{'0' * 32}-{SPAN_ID}-01",
    "no parent": f"00-{TRACE_ID}-{'0' * 16}-01",
    "short": PARENT[:-1],
    "longer than this version is": PARENT + "-00",
    "forbidden version": "ff" + PARENT[2:],
    "later version with a tail of its own": "01" + PARENT[2:] + "x",
    "space": f" {PARENT}",
    "line break": PARENT + "\n",
    "too long": "01" + PARENT[2:] + "-" + "x" * 256,
}


@pytest.mark.parametrize("parent", MALFORMED.values(), ids=list(MALFORMED))
def test_a_malformed_parent_is_dropped(parent: str) -> None:
    """Neither it nor the state that came with it goes on, and nothing is raised."""
    assert {} == passed_on({"traceparent": parent, "tracestate": "a=b"})


@pytest.mark.parametrize("parent", [b"bytes", 7, None, ["list"]])
def test_what_is_no_text_is_dropped(parent: object) -> None:
    """Headers come from another runtime; what is in them is not taken for granted."""
    assert {} == passed_on({"traceparent": parent})
    assert {"traceparent": PARENT} == passed_on({"traceparent": PARENT, "tracestate": parent})


def test_a_later_version_goes_on_with_its_addition() -> None:
    """The standard lets later versions append to what this one has."""
    later = "01" + PARENT[2:] + "-what.ever"
    assert {"traceparent": later} == passed_on({"traceparent": later})


def test_a_state_that_metadata_cannot_hold_is_dropped() -> None:
    """The parent goes on without it."""
    for state in ("", "a=ü", "a=b\r\nx: y", "\x00"):
        assert {"traceparent": PARENT} == passed_on({"traceparent": PARENT, "tracestate": state}), state


def test_a_long_state_loses_its_last_members() -> None:
    """512 characters go on; what is cut is whole members, the oldest ones."""
    member = "x=" + "y" * 98  # a hundred characters
    passed = passed_on({"traceparent": PARENT, "tracestate": ",".join([member] * 6)})
    assert ",".join([member] * 5) == passed["tracestate"]
    exact = "x=" + "y" * 510
    assert exact == passed_on({"traceparent": PARENT, "tracestate": exact})["tracestate"]
    assert "tracestate" not in passed_on({"traceparent": PARENT, "tracestate": exact + "y"})
    assert "tracestate" not in passed_on({"traceparent": PARENT, "tracestate": "a=b," * 4096})


@given(st.text(), st.text())
def test_whatever_comes_metadata_can_hold_what_goes_on(parent: str, state: str) -> None:
    """Any text is dropped or fits into a call's metadata."""
    for first in (parent, PARENT):
        for value in passed_on({"traceparent": first, "tracestate": state}).values():
            assert 0 < len(value) <= 512
            assert value == value.strip()
            assert all(" " <= char <= "~" for char in value)


def test_a_trace_takes_the_place_of_a_calls_own() -> None:
    """Other metadata stays, nothing is changed in place, and a stale context does not go on."""
    metadata = {"x-data-parallel-rank": "1", "traceparent": "garbage", "tracestate": "a=b"}
    assert {"x-data-parallel-rank": "1", "traceparent": PARENT} == with_trace(metadata, {"traceparent": PARENT})
    assert {"x-data-parallel-rank": "1"} == with_trace(metadata, {})
    assert 3 == len(metadata)
    assert {"x-data-parallel-rank": "1"} == with_trace({"x-data-parallel-rank": "1"}, {})
