"""One case and more for every rule of converting requests and answers, put to our worker and to the Rust sidecar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.differential import Case, Difference
from support.directed import ROLES, Directed, in_role, reply_in_role
from support.directed_replies import FAILURES, REPLIES
from support.directed_requests import REQUESTS
from support.samples import minimal_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.rust_deviations import Deviation, Record

    Unexplained = Callable[[str, Case], list[Difference]]

pytestmark = pytest.mark.timeout(120)


def directed() -> list[object]:
    """Every case in each of its roles; the roles one after the other, so that each is started once."""
    return [
        pytest.param(role, case, id=f"{role}-{case.name}", marks=pytest.mark.rule(*case.rules))
        for role in ROLES
        for case in (*REQUESTS, *REPLIES)
        if role in case.roles
    ]


@pytest.mark.parametrize(("role", "case"), directed())
def test_both_do_the_same(role: str, case: Directed, unexplained: Unexplained) -> None:
    """What the engine gets and what the client gets is the same, but for what is listed."""
    request = in_role(case.request, role)

    assert [] == unexplained(role, Case(request, reply_in_role(case.messages, request, role)))


@pytest.mark.rule("R4.1", "R4.2", "R10.15", "R10.16")
@pytest.mark.parametrize("failure", FAILURES)
def test_both_fail_alike(failure: str, unexplained: Unexplained) -> None:
    """Whatever status ends a request, and wherever it does, the client sees the same kind of error."""
    assert [] == unexplained("agg", Case(minimal_request(), FAILURES[failure]))


def test_every_listed_deviation_exists(record: Record, deviations: list[Deviation]) -> None:
    """Each deviation that a comparison can see was seen above; one that is gone must be taken off the list."""
    if record.cases < len(directed()) + len(FAILURES):
        pytest.skip("only a part of the cases ran")

    assert {deviation.id for deviation in deviations} == record.met
