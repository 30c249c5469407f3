"""Both workers in every role, each role started once, before recording engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.differential import Case, Difference, Pair, Side, compare, pair
from support.rust_deviations import Deviation, Record, explanation, load_deviations
from trio_sidecar.config import DisaggregationMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is generated."""
    parser.addoption("--examples", type=int, default=500, help="generated requests to an aggregated worker")


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Gives the pair of a role, started when first asked for."""
    started: dict[str, Pair] = {}
    managers = []

    def get(role: str) -> Pair:
        if role not in started:
            manager = pair(DisaggregationMode(role), tmp_path_factory.mktemp(role))
            started[role] = manager.__enter__()
            managers.append(manager)
        return started[role]

    yield get
    for manager in managers:
        manager.__exit__(None, None, None)


@pytest.fixture(scope="session")
def deviations() -> list[Deviation]:
    """What is listed."""
    return load_deviations()


@pytest.fixture(scope="session")
def record() -> Record:
    """What the comparisons have met so far."""
    return Record()


@pytest.fixture(scope="session")
def unexplained(
    workers: Callable[[str], Pair], deviations: list[Deviation], record: Record
) -> Callable[[str, Case], list[Difference]]:
    """Puts a case to both workers in a role; gives the differences that are not listed."""

    def differences(role: str, case: Case) -> list[Difference]:
        observed = workers(role).observe(case)
        record.cases += 1
        found: list[Difference] = []
        for difference in compare(observed[Side.OURS], observed[Side.RUST]):
            listed = explanation(difference, case.request, role, deviations)
            if listed is None:
                found.append(difference)
            else:
                record.met.add(listed)
        return found

    return differences


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks back on all other tests comes last, in whichever order they run."""
    items.sort(key=lambda item: "every_listed" in item.name)
