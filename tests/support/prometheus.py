"""A real Prometheus on this machine, and its promtool."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import pytest
import yaml

from support import peers
from support.deployment import ALERTS
from support.processes import Child, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

VARIABLE = "TRIO_SIDECAR_PROMETHEUS"
"""Names a directory that holds ``prometheus`` and ``promtool``."""


def binary(name: str) -> str:
    """Where one of the two programs is; skips the test if it is nowhere."""
    found = shutil.which(name, path=os.environ.get(VARIABLE)) or shutil.which(name)
    if found is None:
        pytest.skip(
            f"{name} is neither on PATH nor below {VARIABLE}; nox -s observability fetches it where apt-get can"
        )
    return found


def promtool(*arguments: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; whether it is content is its return code, why not its output."""
    argv = [binary("promtool"), *map(str, arguments)]
    return subprocess.run(
        argv, cwd=directory, env=peers.environment(), capture_output=True, text=True, timeout=60, check=False
    )


@attrs.frozen(slots=True)
class Prometheus:
    """A running Prometheus."""

    process: Child
    url: str

    def query(self, expression: str) -> list[Any]:
        """The samples that an expression has now: pairs of labels and value, without those that are not numbers."""
        answer = self._get("query", query=expression)
        assert answer["resultType"] == "vector"
        return [one for one in answer["result"] if one["value"][1] != "NaN"]

    def label_values(self, metric: str, label: str) -> list[str]:
        """The values that a label of a metric has."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": metric})
        return found

    def rules(self) -> list[Any]:
        """The rules that it evaluates."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10, trust_env=False)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]


@contextlib.contextmanager
def running_prometheus(directory: Path, *, job: str, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Start one that scrapes these every second and evaluates our alerts; ready once it answers."""
    program = binary("prometheus")
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALERTS)],
                "scrape_configs": [{"job_name": job, "static_configs": [{"targets": list(targets)}]}],
            }
        )
    )
    port = free_port()
    flags = {
        "--config.file": config,
        "--storage.tsdb.path": directory / "tsdb",
        "--web.listen-address": f"127.0.0.1:{port}",
        "--log.level": "warn",
    }
    argv = [program, *(f"{flag}={value}" for flag, value in flags.items())]
    found = Prometheus(
        Child("prometheus", argv, env=peers.environment(), log_dir=directory), f"http://127.0.0.1:{port}"
    )
    try:
        found.process.wait_until(lambda: _ready(found.url), "ready", seconds=30)
        yield found
    finally:
        found.process.close(seconds=5)


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/-/ready", timeout=5, trust_env=False).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False
