"""Settings that belong to a process."""

from __future__ import annotations

import pytest

from trio_sidecar.config import (
    FrontendSettings,
    HostKind,
    HostSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    ServerSettings,
    UpSettings,
    WorkerKind,
    resolve,
)
from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.errors import InvalidConfig


def test_defaults() -> None:
    """Nothing has to be given."""
    assert ListenAddress(host="127.0.0.1", port=50051) == resolve(ServerSettings, flags={}, environ={}).listen
    assert HostKind.UVLOOP is resolve(HostSettings, flags={}, environ={}).host_loop
    assert LogSettings(level=LogLevel.INFO, format=LogFormat.AUTO) == resolve(LogSettings, flags={}, environ={})
    assert FrontendSettings(http_host="127.0.0.1", http_port=8000) == resolve(FrontendSettings, flags={}, environ={})
    assert UpSettings(worker=WorkerKind.TRIO, ask=None, http_port=None) == resolve(UpSettings, flags={}, environ={})


@pytest.mark.parametrize("cls", [FrontendSettings, UpSettings])
@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_http_port_is_a_port(cls: type[FrontendSettings | UpSettings], port: str) -> None:
    """The HTTP service listens on a port from 1 to 65535."""
    with pytest.raises(InvalidConfig, match=r"--http-port.* 1 to 65535"):
        resolve(cls, flags={"--http-port": port}, environ={})


@pytest.mark.parametrize(
    ("cls", "flag", "allowed"),
    [
        (LogSettings, "--log-level", "debug, info, warning, error"),
        (LogSettings, "--log-format", "auto, console, json"),
        (HostSettings, "--host-loop", "uvloop, trio"),
        (UpSettings, "--worker", "trio, rust"),
    ],
)
def test_choices_are_listed(cls: type[LogSettings], flag: str, allowed: str) -> None:
    """A word that is not known is answered with those that are."""
    with pytest.raises(InvalidConfig, match=f"{flag}: 'x' is not allowed; use {allowed}"):
        resolve(cls, flags={flag: "x"}, environ={})


@pytest.mark.parametrize("flag", ["--withdraw-grace-secs", "--drain-secs"])
def test_server_shutdown_times_must_not_be_negative(flag: str) -> None:
    """Zero means not to wait; less means nothing."""
    assert resolve(ServerSettings, flags={flag: "0"}, environ={})
    with pytest.raises(InvalidConfig, match=f"{flag}: -1 is not allowed; use 0 or more seconds"):
        resolve(ServerSettings, flags={flag: "-1"}, environ={})


def test_up_needs_some_time_to_start() -> None:
    """A budget of zero could never suffice."""
    with pytest.raises(InvalidConfig, match="--startup-secs: 0 is not allowed"):
        resolve(UpSettings, flags={"--startup-secs": "0"}, environ={})


@pytest.mark.parametrize("cls", [FrontendSettings, UpSettings])
def test_http_host_is_an_address(cls: type[FrontendSettings | UpSettings]) -> None:
    """Dynamo's HTTP service takes addresses only; localhost is understood, other names are refused."""
    for text, host in (("localhost", "127.0.0.1"), ("[::1]", "::1"), (" 0.0.0.0 ", "0.0.0.0")):
        assert host == resolve(cls, flags={"--http-host": text}, environ={}).http_host
    with pytest.raises(InvalidConfig, match=r"--http-host: 'example.org' is not allowed; use an IP address such as"):
        resolve(cls, flags={"--http-host": "example.org"}, environ={})


def test_an_empty_http_host_is_refused_by_the_variables_name() -> None:
    """It would mean every address, or none."""
    with pytest.raises(InvalidConfig, match="DYN_HTTP_HOST: must not be empty"):
        resolve(FrontendSettings, flags={}, environ={"DYN_HTTP_HOST": ""})


@pytest.mark.parametrize(("question", "words"), [("", "must not be empty"), ("\udcff", "is not text in this locale's")])
def test_a_question_must_be_one(question: str, words: str) -> None:
    """What cannot be asked is refused before anything starts."""
    with pytest.raises(InvalidConfig, match=f"--ask: {words}"):
        resolve(UpSettings, flags={"--ask": question}, environ={})
