"""Command lines that are partly vLLM's."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.cli import main, vllm
from trio_sidecar.config import VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Given = tuple[dict[str, str | bool], list[str]]


def given(monkeypatch: pytest.MonkeyPatch, command: str, *argv: str) -> Given:
    """What a command gets: our flags, and the rest."""
    seen: list[Given] = []

    def note(flags: Mapping[str, str | bool], environ: Mapping[str, str], rest: Sequence[str]) -> int:
        seen.append((dict(flags), list(rest)))
        return 0

    monkeypatch.setattr(vllm, command, note)
    assert 0 == main(argv)
    (found,) = seen
    return found


def test_what_is_ours_and_what_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known flags are ours wherever they stand; all else goes to vLLM in its order, short flags and values included."""
    line = ["engine", "vllm", "org/m", "--dtype", "float32", "--listen", "127.0.0.1:0", "-tp", "2", "--a=b", "--debug"]
    flags, rest = given(monkeypatch, "engine_vllm", *line)
    assert {"--listen": "127.0.0.1:0", "--debug": True} == flags
    assert ["org/m", "--dtype", "float32", "-tp", "2", "--a=b"] == rest


def test_a_worker_with_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--engine vllm`` makes the rest vLLM's; without it, the rest is refused as ever."""
    flags, rest = given(monkeypatch, "worker_vllm", "worker", "--engine", "vllm", "org/m", "--seed", "1")
    assert ({"--engine": "vllm"}, ["org/m", "--seed", "1"]) == (flags, rest)
    assert 2 == main(["worker", "org/m"])
    assert 2 == main(["worker", "--engine", "sglang", "org/m"])


def test_up_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that the mock engine has as well are collected by us, and handed on later."""
    line = ["up", "--engine", "vllm", "--model", "org/m", "--max-model-len", "9", "--enforce-eager"]
    flags, rest = given(monkeypatch, "up_vllm", *line)
    assert {"--engine": "vllm", "--model": "org/m", "--max-model-len": "9"} == flags
    assert ["--enforce-eager"] == rest


@pytest.mark.parametrize(
    "argv",
    [
        ["engine", "vllm"],
        ["engine", "vllm", "--dtype", "float32"],
        ["worker", "--engine", "vllm"],
        ["worker", "--engine=vllm", "org/m", "--grpc-endpoint=127.0.0.1:1"],
        ["up", "--engine", "vllm"],
        ["engine", "vllm", "org/m", "--restart-engine", "often"],
    ],
)
def test_wrong_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, no traceback."""
    assert 2 == main(argv)
    said = capsys.readouterr().err
    assert 1 == len(said.splitlines()), said


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("vllm", None)])
def test_a_missing_extra_is_named(
    spec: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without vLLM, or with a mere directory of that name, the message says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert 2 == main(["engine", "vllm", "org/m"])
    assert "trio-sidecar[vllm]" in capsys.readouterr().err


def test_the_settings_of_a_command_line() -> None:
    """The model, vLLM's arguments, and ours with their defaults."""
    found = vllm.vllm_settings("x", {"--restart-engine": "2"}, {}, ["org/m", "--a", "b"])
    assert VllmSettings(model="org/m", arguments=("--a", "b"), restart_engine=2) == found


def test_help_says_how_vllms_arguments_are_passed(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours are listed; for vLLM's there is one sentence."""
    assert 0 == main(["engine", "vllm", "--help"])
    said = capsys.readouterr().out
    assert "--restart-engine" in said
    assert "goes to vLLM" in " ".join(said.split())
