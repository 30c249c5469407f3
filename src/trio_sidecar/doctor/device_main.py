"""Look at torch, the device, vLLM and a short generation, and write one JSON object a line for each.

``python -m trio_sidecar.doctor.device_main ENGINE [MODEL [vLLM's arguments]]``; started by
:mod:`trio_sidecar.doctor.device`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.bridge import Host, run, run_aio
from trio_sidecar.config import MockSettings, VllmSettings
from trio_sidecar.doctor.report import Finding, Mark, failed, fine, skipped, warned
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.errors import SidecarError, cause_chain
from trio_sidecar.wire import GenerateRequest, StoppingCriteria, TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.engines.contract import Engine

__all__ = ["main"]

TOKENS = 16
PROMPT = (1, 2, 3)
MIB = 1 << 20
DRIVER = Path("/proc/driver/nvidia/version")
GPU_BUILDS = ("cuda", "hip", "xpu")


def look_at_torch() -> Finding:
    """Its version and what it was built for."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return failed(
            "torch", f"cannot be imported: {error}", "pip install 'trio-sidecar[vllm]', or see docs/vllm.md for CPUs"
        )
    built = [f"{name} {version}" for name in GPU_BUILDS if (version := getattr(torch.version, name, None))]
    return fine("torch", f"{torch.__version__}, built for {', '.join(built) or 'the CPU only'}")


def look_at_device() -> Finding:
    """The accelerators that torch sees; without one, whether that was to be expected."""
    torch = importlib.import_module("torch")
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            found = [_accelerator(backend, index) for index in range(backend.device_count())]
            return fine("device", f"{'; '.join(found)}{_driver()}")
    if any(getattr(torch.version, name, None) for name in GPU_BUILDS):
        hint = "check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, and whether the container was given the GPU"
        return failed("device", f"no GPU, though torch was built for one{_driver()}", hint)
    return warned(
        "device", f"the CPU, {os.cpu_count()} cores", "fine for a test; a GPU needs the GPU builds of torch and vLLM"
    )


def _accelerator(backend: Any, index: int) -> str:
    properties = backend.get_device_properties(index)
    return f"{properties.name} with {properties.total_memory // MIB} MiB"


def _driver() -> str:
    try:
        return f"; driver {DRIVER.read_text(encoding='utf-8').splitlines()[0].strip()}"
    except (OSError, IndexError):
        return ""


def look_at_vllm() -> Finding:
    """Whether it has what we need of it."""
    from trio_sidecar.engines.vllm_binding import load_binding  # noqa: PLC0415

    try:
        binding = load_binding()
    except SidecarError as error:
        return failed("vLLM", cause_chain(error), "pip install 'trio-sidecar[vllm]', or see docs/vllm.md for CPUs")
    return fine("vLLM", binding.version)


async def generate(opened: AbstractAsyncContextManager[Engine]) -> Finding:
    """A few tokens from an engine."""
    begun = time.monotonic()
    async with opened as engine:
        ready = time.monotonic()
        count = await run_aio(_aio_count, engine)
        seconds = time.monotonic() - ready
    if count != TOKENS:
        return failed("generation", f"{count} tokens, expected {TOKENS}", "")
    return fine("generation", f"{count} tokens; the engine was ready after {ready - begun:.1f} s", seconds=seconds)


async def _aio_count(engine: Engine) -> int:
    stopping = StoppingCriteria(max_new_tokens=TOKENS, min_new_tokens=TOKENS, ignore_eos=True)
    request = GenerateRequest(
        request_id="doctor", token_ids=TokenIds(ids=list(PROMPT)), stopping=stopping, temperature=0.0
    )
    count = 0
    async with engine.aio_generate(request, {}) as stream:
        while answers := await stream.aio_receive():
            count += sum(answer.outputs.num_tokens for answer in answers if answer.outputs is not None)
    return count


def look_at_generation(engine: str, arguments: list[str]) -> Finding:
    """Start the engine and let it speak."""
    if engine == "mock":
        return run(generate, open_mock(MockSettings()), host=Host.UVLOOP)
    from trio_sidecar.engines.vllm import open_vllm  # noqa: PLC0415

    settings = VllmSettings(model=arguments[0], arguments=tuple(arguments[1:]))
    return run(generate, open_vllm(settings), host=Host.UVLOOP)


def main(argv: list[str]) -> int:
    """Look at one after another, until one has failed."""
    engine, *arguments = argv
    # What libraries print must not mix with what is found.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    looks: list[tuple[str, Callable[[], Finding]]] = []
    if engine != "mock":
        looks += [("torch", look_at_torch), ("device", look_at_device), ("vLLM", look_at_vllm)]
    if engine == "mock" or arguments:
        looks.append(("generation", lambda: look_at_generation(engine, arguments)))
    for name, look in looks:
        try:
            finding = look()
        except SidecarError as error:
            finding = failed(name, cause_chain(error), "")
        _write(out, finding)
        if finding.mark is Mark.FAILED:
            return 1
    if engine != "mock" and not arguments:
        _write(out, *skipped(["generation"], "name a MODEL to generate with"))
    return 0


def _write(out: Any, *findings: Finding) -> None:
    for finding in findings:
        out.write(json.dumps({**attrs.asdict(finding), "mark": finding.mark.value}) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
