"""The doctor's command line: what it asks, what it prints, how it ends."""

from __future__ import annotations

import json

import pytest

from trio_sidecar.cli import main

FILES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/tmp"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_SIDECAR_GRPC_ENDPOINT", "DYN_SYSTEM_PORT", "DYN_EVENT_PLANE", "DYN_REQUEST_PLANE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in FILES.items():
        monkeypatch.setenv(name, value)


def test_a_wrong_endpoint_is_the_report_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The address is the broken layer, by flag and value, and the exit code is 2."""
    assert 2 == main(["doctor", "--grpc-endpoint", "127.0.0.1:99999"])
    out = capsys.readouterr().out
    assert "✗ address: --grpc-endpoint: port 99999 is not allowed" in out
    assert "broken: address" == out.splitlines()[-1]


def test_the_variable_of_the_worker_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker would connect to is looked at, and JSON holds the same."""
    monkeypatch.setenv("DYN_SIDECAR_GRPC_ENDPOINT", "127.0.0.1:1")
    assert 2 == main(["doctor", "--json", "--timeout-secs=2"])
    report = json.loads(capsys.readouterr().out)
    assert "broken: TCP" == report["verdict"]
    sections = {section["title"]: section["findings"] for section in report["sections"]}
    assert ["address", "DNS", "TCP"] == [each["name"] for each in sections["engine endpoint"]][:3]


def test_without_an_endpoint_the_rest_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """It says how to name one."""
    assert main(["doctor"]) in (0, 1)
    out = capsys.readouterr().out
    assert "· address: name one with --grpc-endpoint" in out
    assert "✓ discovery: files in /tmp" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout-secs=0"], "--timeout-secs: 0 is not allowed"),
        (["--engine", "torch"], "--engine: 'torch' is not allowed"),
        (["MODEL"], "unexpected argument 'MODEL'"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """They end with exit code 2 and a line that names the flag."""
    assert 2 == main(["doctor", *arguments])
    assert words in capsys.readouterr().err
