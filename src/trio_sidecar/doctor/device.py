"""The machine of an engine in our own process: device, driver, builds, and a short generation.

All of it happens in a process of its own, :mod:`trio_sidecar.doctor.device_main`: a driver that crashes, or a library
that takes the process with it, then ends in one line here and not in the doctor's own death.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import trio

from trio_sidecar.doctor.report import Finding, Mark, failed, skipped

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

__all__ = ["LAYERS", "examine_engine"]

LAYERS = ("torch", "device", "vLLM", "generation")
LAST_LINES = 3


async def examine_engine(engine: str, arguments: Sequence[str], *, seconds: float) -> tuple[Finding, ...]:
    """Look at what the engine would run on (Trio-flavoured).

    Args:
        engine: ``vllm`` or ``mock``.
        arguments: Model and vLLM's own arguments; without a model nothing is generated.
        seconds: For all of it; loading a model takes its time.
    """
    argv = [sys.executable, "-m", "trio_sidecar.doctor.device_main", engine, *arguments]
    with trio.move_on_after(seconds) as scope:
        done = await trio.run_process(argv, check=False, capture_stdout=True, capture_stderr=True)
    if scope.cancelled_caught:
        return (failed(engine, f"no end within {seconds:g} s", "raise --engine-timeout-secs"),)
    return read_findings(done)


def read_findings(done: subprocess.CompletedProcess[bytes]) -> tuple[Finding, ...]:
    """What the child has written, one JSON object a line; its death is a finding too."""
    findings = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            findings.append(Finding(**{**found, "mark": Mark(found["mark"])}))
    names = {finding.name for finding in findings}
    missing = [name for name in LAYERS if name not in names]
    ended = bool(findings) and findings[-1].mark is Mark.FAILED
    if done.returncode != 0 and missing and not ended:
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        last = " | ".join(said[-LAST_LINES:])
        findings.append(failed(missing[0], f"the process ended with {how}: {last}", "run it with --debug to see all"))
        missing = missing[1:]
    if missing and findings and findings[-1].mark is Mark.FAILED:
        findings += skipped(missing, f"not reached, because of {findings[-1].name}")
    return tuple(findings)
