"""What a child process tells of the device, and what is told of a child that dies."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import Any

import pytest
import trio

from trio_sidecar.doctor import device, device_main
from trio_sidecar.doctor.device import examine_engine, read_findings
from trio_sidecar.doctor.report import Mark

FINE = json.dumps({"name": "torch", "mark": "ok", "detail": "2.13", "hint": "", "seconds": None})
BAD = json.dumps({"name": "device", "mark": "failed", "detail": "none", "hint": "", "seconds": None})


def done(code: int, *lines: str, stderr: str = "") -> subprocess.CompletedProcess[bytes]:
    """An ended child."""
    return subprocess.CompletedProcess([], code, "\n".join(lines).encode(), stderr.encode())


def marks(findings: Any) -> dict[str, Mark]:
    """By name."""
    return {finding.name: finding.mark for finding in findings}


def test_a_child_that_dies_is_told_in_one_line() -> None:
    """The layer at which it died is the broken one, with what it said last; later ones were not reached."""
    findings = read_findings(done(-11, FINE, stderr="one\n\ntwo\nthree\nfour\n"))
    assert {"torch": Mark.FINE, "device": Mark.FAILED, "vLLM": Mark.SKIPPED, "generation": Mark.SKIPPED} == marks(
        findings
    )
    assert "the process ended with signal 11: two | three | four" == findings[1].detail


def test_a_finding_that_fails_ends_the_look() -> None:
    """What follows it is skipped, and noise between findings is ignored."""
    findings = read_findings(done(1, FINE, "noise", BAD))
    assert [Mark.FINE, Mark.FAILED, Mark.SKIPPED, Mark.SKIPPED] == [finding.mark for finding in findings]
    assert "not reached, because of device" == findings[-1].detail


async def test_the_mock_engine_needs_no_device() -> None:
    """It generates in a child process, and nothing else is looked at."""
    (finding,) = await examine_engine("mock", [], seconds=15)
    assert ("generation", Mark.FINE) == (finding.name, finding.mark)
    assert "16 tokens" in finding.detail


async def test_a_child_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed when its time is over."""
    monkeypatch.setattr(device, "sys", types.SimpleNamespace(executable="/bin/cat"))
    monkeypatch.setattr(trio, "run_process", _forever)
    (finding,) = await examine_engine("vllm", [], seconds=0.05)
    assert (Mark.FAILED, "no end within 0.05 s") == (finding.mark, finding.detail)


async def _forever(*_: Any, **__: Any) -> Any:
    await trio.sleep_forever()


def fake_torch(*, gpu: bool, cuda: str | None) -> types.ModuleType:
    """A torch with or without a GPU, and built for one or not."""
    torch: Any = types.ModuleType("torch")
    torch.__version__ = "2.13.0"
    torch.version = types.SimpleNamespace(cuda=cuda)
    properties = types.SimpleNamespace(name="H200", total_memory=140 << 30)
    torch.cuda = types.SimpleNamespace(
        is_available=lambda: gpu, device_count=lambda: 2, get_device_properties=lambda _: properties
    )
    return torch  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("gpu", "cuda", "mark", "words"),
    [
        (True, "12.9", Mark.FINE, "H200 with 143360 MiB; H200 with 143360 MiB"),
        (False, "12.9", Mark.FAILED, "no GPU, though torch was built for one"),
        (False, None, Mark.WARNED, "the CPU"),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, gpu: bool, cuda: str | None, mark: Mark, words: str) -> None:
    """A GPU that a GPU build does not see is a fault; a CPU build without one is only slow."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpu=gpu, cuda=cuda))
    finding = device_main.look_at_device()
    assert mark is finding.mark
    assert words in finding.detail
    built = "cuda 12.9" if cuda else "the CPU only"
    assert f"2.13.0, built for {built}" == device_main.look_at_torch().detail


def test_torch_and_vllm_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named with what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for finding in (device_main.look_at_torch(), device_main.look_at_vllm()):
        assert Mark.FAILED is finding.mark
        assert "trio-sidecar[vllm]" in finding.hint
