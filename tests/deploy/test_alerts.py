"""The files for Prometheus and Grafana, as far as they can be read without either."""

from __future__ import annotations

import re

import pytest

from support.deployment import (
    Query,
    alerts,
    dashboard,
    dashboard_queries,
    dashboard_variables,
    prometheus_config,
)
from trio_sidecar.config import WorkerSettings, options_of
from trio_sidecar.metrics import WORKER_FAMILIES, Kind

FAMILIES = {family.exposed: family for family in WORKER_FAMILIES}
OURS = r"trio_sidecar_\w+"
JOB = "trio-sidecar"


def families(expression: str) -> set[str]:
    """The exposed names of families that an expression reads; one of a histogram's three stands for it."""
    found = set(re.findall(OURS, expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) if name not in FAMILIES else name for name in found}


@pytest.mark.parametrize("query", [*alerts(), *dashboard_queries()], ids=lambda query: query.name)
def test_a_query_reads_families_that_exist(query: Query) -> None:
    """No query of an alert or a panel reads a metric that no worker has, and each reads one."""
    found = families(query.expression)
    assert found <= set(FAMILIES)
    assert found or "up{" in query.expression


@pytest.mark.parametrize("query", [*alerts(), *dashboard_queries()], ids=lambda query: query.name)
def test_a_query_uses_a_family_as_its_kind_wants(query: Query) -> None:
    """A counter or a histogram is only looked at through a rate or an increase, a gauge never."""
    rated = set(re.findall(rf"(?:rate|increase)\(({OURS})", query.expression))
    for name in set(re.findall(OURS, query.expression)):
        kind = FAMILIES[name].kind if name in FAMILIES else Kind.HISTOGRAM
        assert (kind is not Kind.GAUGE) == (name in rated), name


@pytest.mark.parametrize("query", [*alerts(), *dashboard_queries()], ids=lambda query: query.name)
def test_a_query_names_labels_and_values_that_exist(query: Query) -> None:
    """A misspelt label or value would match nothing, and an alert on it would never fire."""
    for name, selector in re.findall(rf"({OURS}|\bup)\{{([^}}]*)\}}", query.expression):
        key = re.sub(r"_(bucket|sum|count)$", "", name) if name not in FAMILIES else name
        labels = FAMILIES[key].labels if key in FAMILIES else {}
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            if label in {"job", "instance"}:
                continue
            values = value.split("|") if operator in {"=~", "!~"} else [value]
            assert set(values) <= set(labels[label]), (name, label)


def test_every_family_is_on_the_dashboard() -> None:
    """What is measured can be seen."""
    shown = {name for query in dashboard_queries() for name in families(query.expression)}
    assert set(FAMILIES) == shown


def test_alerts_say_what_happened_and_how_bad_it_is() -> None:
    """Whoever is woken finds a summary, a description and a severity, each in a sentence of its own."""
    names = [alert.name for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert.rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description"} == set(alert.rule["annotations"])
        assert all(text.endswith(".") for text in alert.rule["annotations"].values())


def test_the_threshold_of_open_requests_follows_the_default_limit() -> None:
    """The alert comes at nine tenths of what a worker takes by default."""
    (limit,) = (one.default for one in options_of(WorkerSettings) if one.option.flag == "--max-inflight-requests")
    (alert,) = (alert for alert in alerts() if alert.name == "TrioSidecarNearlyFull")
    assert alert.expression.endswith(f"> {limit * 9 // 10}")


def test_a_drain_hangs_later_than_drains_may_take() -> None:
    """A drain within its budget is no alarm."""
    defaults = {one.name: one.default for one in options_of(WorkerSettings)}
    (alert,) = (alert for alert in alerts() if alert.name == "TrioSidecarDrainHangs")
    assert alert.rule["for"] == "5m"
    assert defaults["withdraw_grace_secs"] + defaults["drain_secs"] < 5 * 60


def test_all_read_the_job_that_is_scraped() -> None:
    """Alerts look at the scrape job that the example configuration has."""
    assert [JOB] == [job["job_name"] for job in prometheus_config()["scrape_configs"]]
    assert all(f'job="{JOB}"' in alert.expression for alert in alerts())


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Panels have an id and a place of their own on the grid of 24, and the data source that the user chooses."""
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel.get("type") == "row" or panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert all(panel.get("description") for panel in panels if panel["type"] != "row")
    assert {"datasource", "job", "instance"} == set(dashboard_variables())
    assert all('job=~"$job", instance=~"$instance"' in query.expression for query in dashboard_queries())
