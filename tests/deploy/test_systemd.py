"""The systemd unit: its command against our command line, its times against our defaults."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.deployment import DEPLOY, DYNAMO_VARIABLES, OTHER_VARIABLES, Understood, understood
from trio_sidecar.config import LogFormat, LogSettings, WorkerSettings
from trio_sidecar.worker.dynamo import PREFILL_DRAIN, WATCHDOG_SECS

if TYPE_CHECKING:
    from pathlib import Path

SYSTEMD = DEPLOY / "systemd"
UNIT = SYSTEMD / "trio-sidecar-worker.service"
PROGRAM = "/opt/trio-sidecar/bin/trio-sidecar"
INSTALLED = "/etc/trio-sidecar"
SPARE_SECS = 10


def directives() -> dict[str, list[str]]:
    """The unit's directives with all their values, in order; sections do not matter to us."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment() -> dict[str, str]:
    """The variables of the unit and of the example file beside it."""
    lines = directives()["Environment"] + (SYSTEMD / "worker.env").read_text().splitlines()
    pairs = [line.removeprefix("#").partition("=") for line in lines if re.match(r"#?[A-Z_]+=", line)]
    return {name: value for name, _, value in pairs}


def command_line() -> Understood:
    """ExecStart as our program reads it, with the example file in the place of the installed one."""
    (command,) = directives()["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program == PROGRAM
    return understood([part.replace(INSTALLED, str(SYSTEMD)) for part in arguments], environment())


def test_the_command_and_its_file_are_ours() -> None:
    """ExecStart starts a worker whose flags and whose file are understood, and logs as a journal wants it."""
    line = command_line()
    assert ("worker", ()) == (line.command, line.rest)
    settings = line.settings(WorkerSettings)
    assert ("etcd", "tcp", "zmq") == (settings.discovery_backend, settings.request_plane, settings.event_plane)
    assert LogFormat.JSON is line.settings(LogSettings).format


def test_every_variable_is_read_by_somebody() -> None:
    """A variable is a setting of ours, or Dynamo's or a library's."""
    assert set(environment()) <= command_line().variables | DYNAMO_VARIABLES | OTHER_VARIABLES
    assert [f"-{INSTALLED}/worker.env"] == directives()["EnvironmentFile"]


def test_systemd_waits_as_long_as_a_drain_may_take() -> None:
    """TimeoutStopSec has room for withdrawal, a prefill worker's peers, the drain, Dynamo's watchdog, and some more."""
    settings = command_line().settings(WorkerSettings)
    seconds = settings.withdraw_grace_secs + float(PREFILL_DRAIN[1]) + settings.drain_secs + WATCHDOG_SECS + SPARE_SECS
    assert [f"{seconds:g}"] == directives()["TimeoutStopSec"]


def test_the_signal_is_one_that_drains() -> None:
    """The worker alone gets SIGTERM, and systemd is not told to wait for a message that never comes."""
    found = directives()
    assert (["SIGTERM"], ["mixed"], ["exec"]) == (found["KillSignal"], found["KillMode"], found["Type"])


def test_wrong_settings_are_not_tried_again() -> None:
    """Exit code 2 says that flags or variables are wrong; anything else is worth another try."""
    assert (["on-failure"], ["2"]) == (directives()["Restart"], directives()["RestartPreventExitStatus"])


def test_caches_lie_where_the_unit_may_write() -> None:
    """The file system is read-only but for the state directory, so models are kept there."""
    (state,) = directives()["StateDirectory"]
    assert environment()["HF_HOME"].startswith(f"/var/lib/{state}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` finds nothing wrong, once the program is there; a misspelt directive it would."""
    text = UNIT.read_text().replace(PROGRAM, sys.executable)
    for unit, clean in ((text, True), (text.replace("KillMode=", "KillMod="), False)):
        path = tmp_path / UNIT.name
        path.write_text(unit)
        argv = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=False)
        assert clean == ("" == found.stdout + found.stderr), found.stderr
