"""From arguments to an exit code and what is printed."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import trio_sidecar
from trio_sidecar.cli import commands, main
from trio_sidecar.errors import ConnectError, OutputClosed

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_SIDECAR_GRPC_ENDPOINT", "DYN_SIDECAR_GRPC_CONNECTIONS", "DYN_DISAGGREGATION_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def worker_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | int], None]:
    """Lets the worker command return a code or raise an error."""

    def does(what: BaseException | int) -> None:
        def worker(_flags: object, _environ: object) -> int:
            if isinstance(what, BaseException):
                raise what
            return what

        monkeypatch.setattr(commands, "worker", worker)

    return does


@pytest.mark.rule("R2.8")
def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version goes to stdout."""
    assert 0 == main(["--version"])
    assert f"trio-sidecar {trio_sidecar.__version__}\n" == capsys.readouterr().out


@pytest.mark.rule("R2.5")
def test_worker_help_lists_flags_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Help exits 0 and names what the rule asks for."""
    assert 0 == main(["worker", "--help"])
    text = capsys.readouterr().out
    for word in (
        "--grpc-endpoint",
        "--grpc-connections",
        "--disaggregation-mode",
        "DYN_SIDECAR_GRPC_ENDPOINT",
        "DYN_SIDECAR_GRPC_CONNECTIONS",
        "DYN_SIDECAR_GRPC_CONNECT_ATTEMPT_TIMEOUT_SECS",
        "DYN_SIDECAR_GRPC_RETRY_INTERVAL_SECS",
        "DYN_SIDECAR_GRPC_STARTUP_DEADLINE_SECS",
    ):
        assert word in text


@pytest.mark.rule("R2.8")
@pytest.mark.parametrize("command", [[], ["up"], ["worker"], ["engine"], ["engine", "mock"], ["frontend"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help works without extras and without settings."""
    assert 0 == main([*command, "--help"])
    assert "usage: trio-sidecar" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    """Help is fast, because nothing is imported that it does not need."""
    program = (
        "import sys; from trio_sidecar.cli import main; main(['worker', '--help']);"
        "heavy = {'trio', 'asyncio', 'grpclib', 'dynamo', 'structlog', 'betterproto2'};"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15, check=True)

    assert "[]\n" == done.stderr


@pytest.mark.rule("R2.7", "R11.11")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["wroker"],
            "trio-sidecar: unknown command 'wroker' (did you mean worker?); commands are up, worker, engine, frontend",
        ),
        (["engine", "mcok"], "trio-sidecar engine: unknown command 'mcok' (did you mean mock?)"),
        (["engine"], "trio-sidecar engine: name a command"),
        ([], "trio-sidecar: name a command"),
        (["--bogus"], "trio-sidecar: unknown flag --bogus"),
        (["worker"], "trio-sidecar worker: --grpc-endpoint: is required (or set DYN_SIDECAR_GRPC_ENDPOINT)"),
        (["worker", "--grpc-endpoint=h:0"], "trio-sidecar worker: --grpc-endpoint: port 0 is not allowed"),
        (["up", "--ask"], "trio-sidecar up: --ask needs a value"),
        (["up", "--itl-ms=x"], "trio-sidecar up: --itl-ms: 'x' is not a number"),
        (["up", "--disaggregation-mode=agg"], "trio-sidecar up: unknown flag --disaggregation-mode"),
        (["engine", "mock", "--listen=h"], "trio-sidecar engine mock: --listen: 'h' names no port"),
        (
            ["engine", "mock", "--extra-engine-args={}}"],
            "trio-sidecar engine mock: --extra-engine-args: the inline JSON is",
        ),
        (["frontend", "--http-port=0"], "trio-sidecar frontend: --http-port: 0 is not allowed"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with the command line is said in the last line of stderr; nothing is started."""
    assert 2 == main(arguments)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert captured.err.splitlines()[-1].startswith(line)


def test_variables_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad variable is refused by its name."""
    monkeypatch.setenv("DYN_SIDECAR_GRPC_CONNECTIONS", "0")

    assert 2 == main(["worker", "--grpc-endpoint=h:1"])
    assert "trio-sidecar worker: DYN_SIDECAR_GRPC_CONNECTIONS: 0 is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["worker", "--grpc-endpoint=h:1"], ["up"], ["frontend"], ["worker-rust"]])
def test_missing_extra_is_exit_2_with_the_command_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever lacks the extra reads what to type; nothing is started."""

    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)

    assert 2 == main(arguments)
    assert "pip install 'trio-sidecar[dynamo]'" in capsys.readouterr().err


def test_the_commands_code_is_the_exit_code(worker_does: Callable[[BaseException | int], None]) -> None:
    """A command decides its own exit code."""
    worker_does(7)

    assert 7 == main(["worker"])


def test_a_failure_at_run_time_is_exit_1_and_one_line(
    worker_does: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The line holds the causes; a group around a single error does not hide it."""
    error = ConnectError("no connection")
    error.__cause__ = OSError("refused")
    worker_does(ExceptionGroup("nursery", [ExceptionGroup("nursery", [error])]))

    assert 1 == main(["worker"])
    assert "trio-sidecar worker: no connection: refused\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("nursery", [KeyboardInterrupt()])], ids=["plain", "grouped"]
)
def test_ctrl_c_is_exit_130_and_silent(
    error: BaseException, worker_does: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Who presses Ctrl-C knows what happened."""
    worker_does(error)

    assert 130 == main(["worker"])
    assert "" == capsys.readouterr().err


def test_a_bug_is_exit_1_with_a_traceback(
    worker_does: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that nobody planned for is shown whole, so that it can be reported."""
    worker_does(ZeroDivisionError("boom"))

    assert 1 == main(["worker"])
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.endswith("trio-sidecar worker: this is a bug in trio-sidecar: ZeroDivisionError\n")


def test_python_dash_m_is_the_same_command() -> None:
    """``python -m trio_sidecar`` works and passes the exit code on."""
    done = subprocess.run(
        [sys.executable, "-m", "trio_sidecar", "wroker"], capture_output=True, text=True, timeout=15, check=False
    )

    assert 2 == done.returncode
    assert "did you mean worker?" in done.stderr


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("TRIO_SIDECAR_LOG_LEVEL", "up"),
        ("TRIO_SIDECAR_LOG_FORMAT", "up"),
        ("TRIO_SIDECAR_HOST_LOOP", "up"),
        ("TRIO_SIDECAR_COALESCE", "up"),
        ("TRIO_SIDECAR_SERVER_DRAIN_SECS", "up"),
        ("DYN_SIDECAR_GRPC_CONNECTIONS", "up"),
        ("TRIO_SIDECAR_HOST_LOOP", "engine mock"),
        ("TRIO_SIDECAR_LOG_LEVEL", "frontend"),
        ("TRIO_SIDECAR_LOG_FORMAT", "worker --grpc-endpoint=h:1"),
        ("DYN_HTTP_PORT", "frontend"),
    ],
)
def test_variables_are_checked_before_anything_starts(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that a part of ``up`` would read: exit 2 and one line with the variable's name."""
    monkeypatch.setenv(variable, "x")

    assert 2 == main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert f": {variable}: 'x' is not" in line


def test_what_is_found_out_at_run_time_names_the_variable_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that cannot be listened on is told by the name of what holds it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert 2 == main(["engine", "mock", "--listen", address])
        assert f"trio-sidecar engine mock: --listen: {address} is in use" in capsys.readouterr().err
        monkeypatch.setenv("TRIO_SIDECAR_LISTEN", address)
        assert 2 == main(["engine", "mock"])
    assert f"trio-sidecar engine mock: TRIO_SIDECAR_LISTEN: {address} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OutputClosed("stdout"), BrokenPipeError()])
def test_a_reader_that_has_gone_away_is_exit_141_and_silent(
    error: Exception, worker_does: Callable[[BaseException | int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Like what SIGPIPE does to other programs."""
    worker_does(error)

    assert 141 == main(["worker"])
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "told"),
    [
        ("--version", ">&-", 0, ""),
        ("--version", "<&- >&- 2>&-", 0, ""),
        ("worker --help", ">/dev/full", 1, "No space left on device\n"),
        ("--version", ">/dev/full", 1, "No space left on device\n"),
        ("wroker", "2>&-", 2, ""),
        ("wroker", "2>/dev/full", 2, ""),
    ],
)
def test_streams_that_cannot_be_written(arguments: str, redirection: str, code: int, told: str) -> None:
    """Closed or full ones make no traceback."""
    command = f"exec {shlex.quote(sys.executable)} -m trio_sidecar {arguments} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=15, check=False)

    assert code == done.returncode
    assert done.stderr.endswith(told)
    assert bool(told) == len(done.stderr.splitlines())


def test_ctrl_c_during_the_imports_is_exit_130_and_silent() -> None:
    """The command line takes a moment to be imported; Ctrl-C may come in that moment."""
    program = (
        "import builtins, sys; real = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        "    if name == 'trio_sidecar.cli': raise KeyboardInterrupt\n"
        "    return real(name, *rest, **more)\n"
        "from trio_sidecar.__main__ import main; builtins.__import__ = interrupted; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15, check=False)

    assert (130, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [["engine", "mock", "--listen=127.0.0.1:0"], ["worker", "--grpc-endpoint=127.0.0.1:1"], ["up"], ["frontend"]],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_variable_of_opentelemetry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """It is a wrong setting like any other, whichever command would trace."""
    monkeypatch.setattr(commands, "need_dynamo", lambda command: None)
    monkeypatch.setattr(commands, "start_logging", lambda settings: None)
    monkeypatch.setenv("DYN_LOG", "warn")  # so that what is set in the test is not left behind
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert 2 == main(arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "OTEL_TRACES_EXPORTER: 'zipkin' is not one of otlp, console, or none alone" in last
