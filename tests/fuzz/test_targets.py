"""The fuzz targets under hypothesis, a little each time, and every input that ever made one fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.seeds import seeds
from fuzz.targets import TARGETS, quiet

CRASHES = Path(__file__).parent / "crashes"
EXAMPLES = {"server-face": 150, "client-connection": 150}
"""Fewer where each takes a loop of its own."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet()


@st.composite
def mutations(draw: st.DrawFn, target: str) -> bytes:
    """A sound input with up to four changes: bytes replaced, put in, left out, doubled, or the end cut off."""
    data = draw(st.sampled_from(seeds(target)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8))
        new = draw(st.binary(max_size=6) | st.sampled_from([b"\xff" * 5, b"\0" * 4, b"1e999", b"null", b"[[[["]))
        kind = draw(st.sampled_from(["replace", "insert", "delete", "double", "cut"]))
        part = data[at : at + size]
        data = {
            "replace": data[:at] + new + data[at + len(new) :],
            "insert": data[:at] + new + data[at:],
            "delete": data[:at] + data[at + size :],
            "double": data[:at] + part + part + data[at + size :],
            "cut": data[:at],
        }[kind]
    return data


@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_starts_from_sound_inputs(target: str) -> None:
    """At least one seed of each target is answered in full; from refusals a fuzzer would not come far."""
    answered = [TARGETS[target](seed) for seed in seeds(target)]
    assert True in answered


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_inputs_end_as_promised(target: str) -> None:
    """A damaged input ends in an answer or in an error of the promised kind, never in another exception."""

    @settings(
        max_examples=EXAMPLES.get(target, 400),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations(target) | st.binary(max_size=60))
    def check(data: bytes) -> None:
        TARGETS[target](data)

    check()


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_once_crashed(target: str) -> None:
    """What a fuzzer found stays found."""
    for path in sorted((CRASHES / target).glob("*")):
        TARGETS[target](path.read_bytes())
