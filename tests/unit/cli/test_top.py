"""``trio-sidecar top`` from its arguments to an exit code."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from trio_sidecar.cli.main import main
from trio_sidecar.cli.top import targets
from trio_sidecar.errors import InvalidConfig


def test_targets() -> None:
    """URLs with or without scheme and path; without any, the worker of this environment."""
    urls = ["http://h:1/x", "10.0.0.7:9090", "[::1]:9090"]
    assert ["http://h:1/x", "http://10.0.0.7:9090/", "http://[::1]:9090/"] == [str(at) for at in targets(urls, {})]
    assert ["http://127.0.0.1:8081/"] == [str(at) for at in targets([], {"DYN_SYSTEM_PORT": " 8081 "})]
    assert ["http://h:1/"] == [str(at) for at in targets(["h:1"], {"DYN_SYSTEM_PORT": "8081"})]


@pytest.mark.parametrize(
    ("urls", "environ", "reason"),
    [
        ([], {}, "URL: is missing; name a worker's or an engine's metrics port, such as http://127.0.0.1:9090"),
        ([], {"DYN_SYSTEM_PORT": "-1"}, "URL: is missing"),
        (["https://h:1"], {}, "URL: https is not supported"),
        (["h:x"], {}, "URL"),
        (["http://u@h:1"], {}, "URL: must not include user information"),
    ],
)
def test_what_is_no_target(urls: list[str], environ: dict[str, str], reason: str) -> None:
    """The error says what is allowed."""
    with pytest.raises(InvalidConfig) as caught:
        targets(urls, environ)
    assert str(caught.value).startswith(reason)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong flag, a wrong value, and a stdout that is no terminal: exit code 2."""
    monkeypatch.delenv("DYN_SYSTEM_PORT", raising=False)
    assert 2 == main(["top", "--foo"])
    assert "unknown flag --foo" in capsys.readouterr().err
    assert 2 == main(["top", "--interval-secs", "0", "h:1"])
    assert "--interval-secs" in capsys.readouterr().err
    assert 2 == main(["top", "h:1"])
    assert "--once: is needed where stdout is no terminal" in capsys.readouterr().err


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody there: the reason, and exit code 1."""
    assert 1 == main(["top", "127.0.0.1:1", "--once", "--interval-secs", "0.01"])
    assert "cannot connect to 127.0.0.1:1" in capsys.readouterr().out


def test_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    find = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "trio_sidecar.top.run":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert 2 == main(["top", "h:1", "--once"])
    assert "trio-sidecar[top]" in capsys.readouterr().err
