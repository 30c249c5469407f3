"""What ``up`` tells its user."""

from __future__ import annotations

import io
import re

import pytest

from trio_sidecar.up.report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def report_stage(report: Report) -> None:
    with report.stage("engine", "starting") as stage:
        stage.outcome = "listening on h:1"


def test_stages_are_plain_lines_in_a_pipe() -> None:
    """One line for each stage, when it is done, with its time."""
    stream = io.StringIO()
    report_stage(Report(stream))

    assert re.fullmatch(r"  engine     listening on h:1 \(\d+\.\d s\)\n", stream.getvalue())


def test_stages_are_rewritten_on_a_terminal() -> None:
    """A terminal shows what is under way, and then the outcome in its place."""
    stream = Terminal()
    report_stage(Report(stream))

    assert re.fullmatch(r"  engine     starting …\r\x1b\[K  engine     listening on h:1 \(.*\)\n", stream.getvalue())


def test_a_stage_that_fails_leaves_no_half_line() -> None:
    """What comes after starts on a clean line, and nothing claims success."""
    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Report(stream).stage("engine", "starting"):
        raise ZeroDivisionError

    assert stream.getvalue().endswith("…\r\x1b[K")


def test_output_of_parts_is_shown_if_verbose() -> None:
    """Each line with its part's name; then nothing is rewritten, not even on a terminal."""
    quiet, verbose = Terminal(), Terminal()
    Report(quiet).on_line("engine", "hello")
    report = Report(verbose, verbose=True)
    report.on_line("engine", "hello")
    report_stage(report)

    assert "" == quiet.getvalue()
    assert verbose.getvalue().startswith("    engine | hello\n")
    assert "\x1b" not in verbose.getvalue()


def test_nobody_listening_is_no_error() -> None:
    """If whoever read the progress has gone, the service goes on."""
    report_stage(Report(Closed()))
