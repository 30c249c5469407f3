"""The files of ``deploy/``, read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
PROMETHEUS_CONFIG = DEPLOY / "prometheus" / "prometheus.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
THRESHOLD = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*[\d.]+\s*(?:#.*)?$")


@attrs.frozen(slots=True, kw_only=True)
class Query:
    """One expression of PromQL that is shipped.

    Attributes:
        name: Where it stands.
        expression: The whole of it.
        rule: The alert around it; empty for one of the dashboard.
    """

    name: str
    expression: str
    rule: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def measured(self) -> str:
        """The expression without the threshold at its end; has a value whether or not that is crossed."""
        text, cut = THRESHOLD.subn("", self.expression)
        assert cut == 1, f"{self.name} does not end in a threshold"
        return text


def alerts() -> list[Query]:
    """The alerts, in order."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [
        Query(name=rule["alert"], expression=rule["expr"], rule=rule) for group in groups for rule in group["rules"]
    ]


def prometheus_config() -> Any:
    """The example configuration of Prometheus."""
    return yaml.safe_load(PROMETHEUS_CONFIG.read_text())


def dashboard() -> Any:
    """The dashboard."""
    return json.loads(DASHBOARD.read_text())


def dashboard_queries() -> list[Query]:
    """The queries of the dashboard's panels, as they are written there."""
    return [
        Query(name=f"{panel['title']} {target['refId']}", expression=target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def dashboard_variables() -> dict[str, Any]:
    """The variables at the dashboard's top, by name."""
    return {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
