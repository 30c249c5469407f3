"""Running the Rust sidecar: its exit codes become ours, and signals are its own."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest
import structlog

from trio_sidecar.worker.rust import run_rust_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def ends_with(error: BaseException | None) -> Callable[[Sequence[str]], None]:
    """A sidecar that ends like that."""

    def run_sidecar(arguments: Sequence[str]) -> None:
        assert ["--grpc-endpoint", "h:1"] == arguments
        if error is not None:
            raise error

    return run_sidecar


@pytest.mark.parametrize(
    ("error", "code", "reasons"),
    [
        (None, 0, []),
        (SystemExit(0), 0, []),
        (SystemExit(2), 2, []),
        (SystemExit("text"), 1, []),
        (ValueError("Unavailable: no engine"), 1, ["Unavailable: no engine"]),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, reasons: list[str]) -> None:
    """Help is 0, a wrong flag is 2, a failure is 1 with its reason."""
    with structlog.testing.capture_logs() as logs:
        assert code == run_rust_worker(["--grpc-endpoint", "h:1"], run_sidecar=ends_with(error))
    assert reasons == [entry["reason"] for entry in logs]


def test_interrupt_is_the_sidecars() -> None:
    """A Ctrl-C that the sidecar deals with raises no KeyboardInterrupt, and Python's handler comes back."""
    before = signal.getsignal(signal.SIGINT)

    def run_sidecar(arguments: Sequence[str]) -> None:
        signal.raise_signal(signal.SIGINT)

    assert 0 == run_rust_worker([], run_sidecar=run_sidecar)
    assert before is signal.getsignal(signal.SIGINT)


def test_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, it says which one to install."""
    monkeypatch.setitem(sys.modules, "dynamo", None)
    monkeypatch.delitem(sys.modules, "dynamo._core", raising=False)
    with structlog.testing.capture_logs() as logs:
        assert 1 == run_rust_worker([])
    assert "pip install 'trio-sidecar[dynamo]'" in logs[0]["reason"]
