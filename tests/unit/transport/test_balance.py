"""The choice of a connection as a table."""

from __future__ import annotations

import pytest

from trio_sidecar.transport.balance import SlotLoad, choose, stream_cap


@pytest.mark.parametrize(
    ("loads", "last", "chosen"),
    [
        ([(0, 5)], -1, 0),
        ([(0, 5), (0, 5), (0, 5)], -1, 0),
        ([(0, 5), (0, 5), (0, 5)], 0, 1),
        ([(0, 5), (0, 5), (0, 5)], 2, 0),
        ([(2, 5), (1, 5), (1, 5)], 1, 2),
        ([(2, 5), (1, 5), (1, 5)], 2, 1),
        ([(1, 5), (2, 5), (3, 5)], 0, 0),
        ([(5, 5), (4, 5)], 1, 1),
        ([(1, 1), (4, 5)], 1, 1),
        ([(5, 5), (5, 5)], 0, None),
        ([(0, 0), (3, 5)], 1, 1),
        ([(0, 0), (0, 0)], 0, None),
        ([(6, 2), (1, 2)], 0, 1),
        ([], -1, None),
    ],
)
def test_choice_of_a_slot(loads: list[tuple[int, int]], last: int, chosen: int | None) -> None:
    """The least-loaded slot below its cap is chosen, equals in turn after the last; full and lost slots never."""
    assert chosen == choose([SlotLoad(*load) for load in loads], last)


@pytest.mark.rule("FR-100", "E3")
@pytest.mark.parametrize(("announced", "cap"), [(0, 0), (1, 1), (2, 1), (100, 99), (257, 256), (2**32 + 1, 256)])
def test_cap_is_below_the_announced_limit(announced: int, cap: int) -> None:
    """A connection never carries as many streams as its peer announced, save where that would leave none."""
    assert cap == stream_cap(announced)
