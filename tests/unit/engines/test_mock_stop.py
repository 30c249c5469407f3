"""Stop strings across pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_sidecar.engines.mock_stop import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What is given out piece by piece, the flush at the end included, and what was found."""
    matcher = StopStrings(stops, include=include)
    given_out = []
    for piece in pieces:
        text, found = matcher.push(piece, match=True)
        given_out.append(text)
        if found is not None:
            return given_out, found
    return [*given_out, matcher.flush()], None


def test_a_stop_string_across_pieces_is_found_and_never_shown() -> None:
    """No part of the stop string is given out before it is complete."""
    assert (["", "a", "b"], "STOP") == run(["STOP"], ["abS", "T", "OPx"])


def test_included_stop_strings_are_shown_up_to_their_end() -> None:
    """With include nothing is held back, and the text ends with the stop string."""
    assert (["abS", "TOP"], "STOP") == run(["STOP"], ["abS", "TOPxyz"], include=True)


def test_held_text_is_flushed_without_a_match() -> None:
    """The beginning of a stop string that never comes is text like any other."""
    pieces, found = run(["STOP"], ["hello S", "TO"])
    assert ("hello STO", None) == ("".join(pieces), found)


def test_the_match_that_is_complete_first_wins() -> None:
    """Not the one that starts first."""
    assert (["ab"], "cd") == run(["bcdef", "cd"], ["abcdef"])


def test_ties_go_to_the_first_of_the_list() -> None:
    """Two stop strings that end together: the caller's order decides."""
    assert (["a"], "bc") == run(["bc", "c"], ["abc"])
    assert (["ab"], "c") == run(["c", "bc"], ["abc"])


def test_no_match_before_matching_begins() -> None:
    """A stop string that ends while matching is off does not count, one that ends after does."""
    matcher = StopStrings(["ab"], include=False)
    assert ("a", None) == matcher.push("ab", match=False)
    assert ("bc", None) == matcher.push("cd", match=True)
    assert ("d", "ab") == matcher.push("ab", match=True)


def test_one_character_stops_hold_nothing_back() -> None:
    """There is nothing to wait for."""
    assert (["ab", "c"], "!") == run(["!"], ["ab", "c!"])


@pytest.mark.rule("FR-058")
@given(
    st.text("ab", min_size=0, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(),
)
def test_cutting_into_pieces_changes_nothing(text: str, stops: list[str], rng: object) -> None:
    """However a text is cut, the same stop string is found and the same text is shown."""
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 5)  # type: ignore[attr-defined]
        pieces.append(rest[:size])
        rest = rest[size:]
    shown, found = run(stops, pieces)
    ends = [(text.find(stop) + len(stop), at, stop) for at, stop in enumerate(stops) if stop in text]
    expected = min(ends)[2] if ends else None
    assert expected == found
    cut = text if expected is None else text[: text.find(expected)]
    assert cut == "".join(shown)
