"""Shell completion: scripts for three shells, and what bash makes of its own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from trio_sidecar.cli import main
from trio_sidecar.cli.completion import SHELLS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_that_knows_the_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written to stdout and names commands, flags and choices."""
    assert 0 == main(["completion", shell])
    script = capsys.readouterr().out
    for word in ("trio-sidecar", "frontend", "grpc-connections", "disaggregation-mode", "prefill"):
        assert word in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("worker --disaggregation-mode ''", "agg prefill decode encode"),
        ("worker --grpc-connections --coalesce ''", "on off"),
        ("engine mo", "mock"),
        ("engine mock --speedup", "--speedup-ratio"),
        ("wo", "worker"),
    ],
)
def test_bash_completes(words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script really completes commands, flags and choices in bash."""
    assert 0 == main(["completion", "bash"])
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    program = f"""
        source {path}
        COMP_WORDS=(trio-sidecar {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _shtab_trio_sidecar
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=15, check=True)

    assert f"{expected}\n" == done.stdout


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which there are."""
    assert 2 == main(["completion", "bsh"])
    assert "did you mean bash?); commands are bash, zsh, fish" in capsys.readouterr().err


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only this command needs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    assert 2 == main(["completion", "bash"])
    assert "trio-sidecar[completion]" in capsys.readouterr().err
