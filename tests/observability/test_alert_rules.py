"""Each alert in promtool's virtual time: in one situation it fires, in one that is nearly as bad it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import yaml

from support.deployment import ALERTS, alerts
from support.prometheus import promtool

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

FIRING = 'count(ALERTS{{alertname="{}", alertstate="firing", job="trio-sidecar", instance="w:1"}})'


@attrs.frozen(slots=True, kw_only=True)
class Case:
    """Two situations for one alert; series by name and labels, values in promtool's notation, one a minute.

    Attributes:
        minutes: When it is looked.
        fires: Where the alert is on then.
        quiet: Where it is not.
    """

    minutes: int
    fires: dict[str, str]
    quiet: dict[str, str]


def state(name: str) -> str:
    """The series of one state of the engine."""
    return f'engine_state{{state="{name}"}}'


def ended(reason: str) -> str:
    """The counter of requests that ended so."""
    return f'requests_ended_total{{reason="{reason}", role="agg"}}'


def histogram(name: str, slow: str, fast: str) -> dict[str, str]:
    """A histogram over which so many observations lie above the second-last bound, and so many below the first."""
    return {
        f'{name}_bucket{{le="0.001"}}': fast,
        f'{name}_bucket{{le="60"}}': slow,
        f'{name}_bucket{{le="+Inf"}}': slow,
    }


CASES = {
    "TrioSidecarWorkerDown": Case(minutes=5, fires={"up": "1 1 0x10"}, quiet={"up": "1 0 1 0 1 1x10"}),
    "TrioSidecarNotServing": Case(
        minutes=40,
        fires={"up": "1x40"},  # no engine yet, so no metrics of ours
        quiet={"up": "1x40", state("serving"): "_x30 1x10"},
    ),
    "TrioSidecarEngineAway": Case(minutes=5, fires={state("away"): "0 1x10"}, quiet={state("away"): "0 1 1 0 1 1x10"}),
    "TrioSidecarEngineRestarts": Case(
        minutes=60,
        fires={"engine_recoveries_total": "0x10 1x10 2x10 3x10 5x40"},
        quiet={"engine_recoveries_total": "0x20 1x20 2x40"},
    ),
    "TrioSidecarDrainHangs": Case(minutes=8, fires={"draining": "0 1x10"}, quiet={"draining": "0 1x3 0x10"}),
    "TrioSidecarRequestsFail": Case(
        minutes=15,
        fires={ended("finished"): "0+90x20", ended("error"): "0+5x20", ended("timeout"): "0+5x20"},
        quiet={ended("finished"): "0+97x20", ended("error"): "0+3x20", ended("cancelled"): "0+50x20"},
    ),
    "TrioSidecarRequestsRefused": Case(
        minutes=15,
        fires={'requests_refused_total{reason="overloaded", role="agg"}': "0+1x20"},
        quiet={'requests_refused_total{reason="invalid", role="agg"}': "0+100x20"},
    ),
    "TrioSidecarNearlyFull": Case(
        minutes=8,
        fires={'requests_in_flight{role="agg"}': "9500x10"},
        quiet={'requests_in_flight{role="agg"}': "9000x10"},
    ),
    "TrioSidecarSlowFirstTokens": Case(
        minutes=20,
        fires=histogram("time_to_first_token_seconds", "0+100x20", "0+90x20"),
        quiet=histogram("time_to_first_token_seconds", "0+100x20", "0+97x20"),
    ),
    "TrioSidecarLoopLag": Case(
        minutes=20,
        fires=histogram("loop_lag_seconds", "0+240x20", "0+230x20"),
        quiet=histogram("loop_lag_seconds", "0+240x20", "0+239x20"),
    ),
    "TrioSidecarPoolWaits": Case(
        minutes=20,
        fires={"pool_wait_seconds_sum": "0+10x20", "pool_wait_seconds_count": "0+100x20"},
        quiet={"pool_wait_seconds_sum": "0+1x20", "pool_wait_seconds_count": "0+100x20"},
    ),
    "TrioSidecarPoolFull": Case(
        minutes=8,
        fires={'pool_streams{connection="0"}': "95x10", 'pool_stream_limit{connection="0"}': "100x10"},
        quiet={
            'pool_streams{connection="0"}': "95x10",
            'pool_stream_limit{connection="0"}': "100x10",
            'pool_streams{connection="1"}': "5x10",
            'pool_stream_limit{connection="1"}': "100x10",
        },
    ),
    "TrioSidecarConnectionsDown": Case(
        minutes=8,
        fires={'pool_connections{state="down"}': "1x10"},
        quiet={'pool_connections{state="down"}': "1x3 0x10", 'pool_connections{state="idle"}': "8x10"},
    ),
    "TrioSidecarStreamResets": Case(
        minutes=15,
        fires={'pool_stream_resets_total{code="ENHANCE_YOUR_CALM"}': "0+1x20"},
        quiet={
            'pool_stream_resets_total{code="CANCEL"}': "0+10x20",
            'pool_stream_resets_total{code="other"}': "0x5 1x20",
        },
    ),
}


def series(situation: dict[str, str]) -> list[dict[str, str]]:
    """A situation as promtool wants it, for one worker of the job."""
    found = []
    for short, values in situation.items():
        name, _, labels = short.rstrip("}").partition("{")
        own = ['job="trio-sidecar"', 'instance="w:1"', *([labels] if labels else [])]
        full = name if name == "up" else f"trio_sidecar_{name}"
        found.append({"series": f"{full}{{{', '.join(own)}}}", "values": values})
    return found


def test_there_is_a_case_for_each_alert() -> None:
    """No alert goes untried."""
    assert {alert.name for alert in alerts()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_alert_fires_when_it_has_to_and_not_before(tmp_path: Path, name: str) -> None:
    """It fires in the bad situation, at the worker that is in it, and stays silent in the other."""
    case = CASES[name]
    expression = FIRING.format(name)
    tests = [
        {
            "interval": "1m",
            "input_series": series(situation),
            "promql_expr_test": [{"expr": expression, "eval_time": f"{case.minutes}m", "exp_samples": samples}],
        }
        for situation, samples in ((case.fires, [{"value": 1, "labels": "{}"}]), (case.quiet, []))
    ]
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    found = promtool("test", "rules", plan, directory=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
