"""Alerts and dashboard in a real Prometheus, over a real worker that serves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx2
import pytest

from support.deployment import ALERTS, DEPLOY, PROMETHEUS_CONFIG, alerts, dashboard_queries, dashboard_variables
from support.managed import managed
from support.prometheus import promtool, running_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.prometheus import Prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(110)]

JOB = "trio-sidecar"
SECONDS = 40
RATE_INTERVAL = "15s"


def test_promtool_takes_the_files() -> None:
    """Prometheus' own check finds nothing wrong with alerts and example configuration."""
    for arguments in (("check", "rules", ALERTS), ("check", "config", PROMETHEUS_CONFIG)):
        found = promtool(*arguments, directory=DEPLOY)
        assert found.returncode == 0, found.stdout + found.stderr


def as_grafana_sends_it(expression: str) -> str:
    """An expression of the dashboard with its variables filled in: everything, over a short time."""
    return expression.replace("$__rate_interval", RATE_INTERVAL).replace("$job", ".*").replace("$instance", ".*")


def missing(prometheus: Prometheus) -> list[str]:
    """The queries that have no data."""
    shown = {query.name: as_grafana_sends_it(query.expression) for query in dashboard_queries()}
    watched = {alert.name: alert.measured for alert in alerts()}
    empty = [name for name, expression in (shown | watched).items() if not prometheus.query(expression)]
    for name, variable in dashboard_variables().items():
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            if not prometheus.label_values(as_grafana_sends_it(metric), label):
                empty.append(name)
    return empty


def test_every_query_has_data_under_load_and_nothing_alarms(tmp_path: Path) -> None:
    """While a worker serves, each panel and each alert's measure has values, and no alert is even pending."""
    with managed(tmp_path, flags={}) as service:
        target = f"127.0.0.1:{service.ports[0]}"
        with running_prometheus(tmp_path / "prometheus", job=JOB, targets=[target]) as prometheus:

            def serve_until(condition: Callable[[], bool]) -> Callable[[], bool]:
                def once() -> bool:
                    assert all(service.complete([1, 2, 3])[0] == httpx2.codes.OK for _ in range(5))
                    return condition()

                return once

            try:
                prometheus.process.wait_until(
                    serve_until(lambda: not missing(prometheus)), "data for every query", seconds=SECONDS
                )
            except AssertionError as error:
                raise AssertionError(missing(prometheus)) from error
            rules = prometheus.rules()
            assert {alert.name for alert in alerts()} == {rule["name"] for rule in rules}
            assert all(rule["health"] == "ok" for rule in rules), rules
            assert [] == prometheus.query("ALERTS")
            unknown = "trio_sidecar_no_such_metric"
            assert [] == prometheus.query(unknown)  # so that "has data" could have been false
