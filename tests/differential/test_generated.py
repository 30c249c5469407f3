"""Generated requests and replies, put to our worker and to the Rust sidecar.

The same ones each time, unless ``--hypothesis-seed`` asks for others; ``--examples`` says how many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.differential import Case, Difference
from support.directed import ROLES
from support.reply_strategies import replies
from support.request_strategies import requests

if TYPE_CHECKING:
    from collections.abc import Callable

    Unexplained = Callable[[str, Case], list[Difference]]

pytestmark = pytest.mark.timeout(3600)
OTHER_ROLES = 5
"""The other roles share most of the code, so they get that many times fewer examples."""


@st.composite
def cases(draw: st.DrawFn, role: str) -> Case:
    """A request to a worker in that role, and what the engine answers."""
    request = draw(requests(role))
    return Case(request, draw(replies(request, role)))


@pytest.mark.parametrize("role", ROLES)
def test_both_do_the_same(role: str, unexplained: Unexplained, pytestconfig: pytest.Config) -> None:
    """What the engine gets and what the client gets is the same, but for what is listed."""
    examples: int = pytestconfig.getoption("--examples")

    @settings(
        max_examples=examples if role == ROLES[0] else max(examples // OTHER_ROLES, 1),
        derandomize=pytestconfig.getoption("--hypothesis-seed", None) is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases(role))
    def compare(case: Case) -> None:
        assert [] == unexplained(role, case)

    compare()
