"""Commands with a vLLM in this process: what is ours and what is vLLM's on one command line.

Our parser takes the flags that it knows; the rest goes to vLLM, with the model in front.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING

from trio_sidecar.cli.flags import UsageError
from trio_sidecar.config import (
    HostSettings,
    LogSettings,
    MockSettings,
    ServerSettings,
    UpSettings,
    VllmSettings,
    WorkerSettings,
    resolve,
)
from trio_sidecar.errors import InvalidConfig, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Flags = Mapping[str, str | bool]
    Environ = Mapping[str, str]

ENGINE_FLAG = "--engine"
MODEL_FLAG = "--model"
VLLM = "vllm"
UP = "trio-sidecar up"
STARTUP_SECS = 1800.0
"""How long ``up`` waits for a vLLM by default, in seconds; large models load for minutes."""

EXTRA = "vllm"
REST_HELP = (
    "MODEL, a path or a repository, comes first; every argument that is not listed here goes to vLLM as it is, for "
    "example --max-model-len 4096 --tensor-parallel-size 2 (see `vllm serve --help=all`), and "
    "--lora-modules NAME=PATH."
)
ENGINE_HELP = (
    "Where the engine is: remote, behind --grpc-endpoint; or vllm, in this process. After vllm come MODEL and any of "
    "vLLM's own arguments. [default: remote]"
)
UP_ENGINE_HELP = (
    "mock, or a vLLM on this machine; with vllm, --model names its model, and arguments that are not listed here go to "
    "vLLM. [default: mock]"
)
UNUSED_ENDPOINT = {"--grpc-endpoint": "127.0.0.1:1"}
"""Worker settings name an endpoint; with the engine in this process nobody connects to it."""


def engine_vllm(flags: Flags, environ: Environ, rest: Sequence[str]) -> int:
    """Serve a vLLM in this process over vLLM's gRPC contract; prints the address that it listens on."""
    settings = vllm_settings("trio-sidecar engine vllm", flags, environ, rest)
    server = resolve(ServerSettings, flags=flags, environ=environ)
    host = resolve(HostSettings, flags=flags, environ=environ)
    log = resolve(LogSettings, flags=flags, environ=environ)
    need_vllm()
    from trio_sidecar.bridge import Host, run  # noqa: PLC0415
    from trio_sidecar.cli.commands import ENGINE_SERVICE, print_address, start_logging  # noqa: PLC0415
    from trio_sidecar.engines.vllm import open_vllm  # noqa: PLC0415
    from trio_sidecar.engines.vllm_child import end_quickly  # noqa: PLC0415
    from trio_sidecar.server import run_server  # noqa: PLC0415
    from trio_sidecar.tracing import open_tracer  # noqa: PLC0415

    start_logging(log)
    end_quickly()
    with open_tracer(environ, ENGINE_SERVICE) as tracer:
        main = functools.partial(run_server, open_vllm(settings), server, print_address, tracer=tracer)
        run(main, host=Host(host.host_loop.value))
    return 0


def worker_vllm(flags: Flags, environ: Environ, rest: Sequence[str]) -> int:
    """Register a model with Dynamo and serve it from a vLLM in this process."""
    if "--grpc-endpoint" in flags:
        raise InvalidConfig("--grpc-endpoint", "cannot be combined with --engine vllm, which connects nowhere")  # noqa: EM101
    vllm = vllm_settings("trio-sidecar worker", flags, environ, rest)
    settings = resolve(WorkerSettings, flags={**flags, **UNUSED_ENDPOINT}, environ=environ)
    host = resolve(HostSettings, flags=flags, environ=environ)
    log = resolve(LogSettings, flags=flags, environ=environ)
    need_vllm()
    from trio_sidecar.bridge import Host, run  # noqa: PLC0415
    from trio_sidecar.cli.commands import WORKER_SERVICE, need_dynamo, start_logging  # noqa: PLC0415
    from trio_sidecar.engines.vllm_child import end_quickly  # noqa: PLC0415
    from trio_sidecar.engines.vllm_shared import serve_worker  # noqa: PLC0415
    from trio_sidecar.tracing import open_tracer  # noqa: PLC0415
    from trio_sidecar.worker import run_worker  # noqa: PLC0415

    need_dynamo("this command")
    start_logging(log)
    end_quickly()
    with open_tracer(environ, WORKER_SERVICE) as tracer:
        main = functools.partial(run_worker, settings, tracer=tracer, process_ends_after=True)
        return run(serve_worker, vllm, main, host=Host(host.host_loop.value))


def up_vllm(flags: Flags, environ: Environ, rest: Sequence[str]) -> int:
    """Start a vLLM as engine, a worker and a front end on this machine, and end all of them together."""
    model = flags.get(MODEL_FLAG)
    if not isinstance(model, str):
        raise UsageError(UP, f"{ENGINE_FLAG} {VLLM} needs {MODEL_FLAG}")
    settings = resolve(UpSettings, flags=flags, environ=environ, fallback={"startup_secs": STARTUP_SECS})
    vllm_settings(UP, flags, environ, [model])  # so that a wrong flag fails here, not in a child
    from trio_sidecar.cli.commands import check_parts, flags_again, need_dynamo  # noqa: PLC0415

    check_parts(settings, environ)
    need_vllm()
    need_dynamo("this command")
    import trio  # noqa: PLC0415

    from trio_sidecar.up.run import own_commands, run_up  # noqa: PLC0415

    # Some flags of the mock engine are vLLM's as well; what vLLM does not know, it refuses.
    shared = {flag: value for flag, value in flags.items() if flag != MODEL_FLAG}
    arguments = (*flags_again(shared, MockSettings), *flags_again(flags, VllmSettings), *rest)
    parts = own_commands(settings.worker, arguments, engine=(VLLM, model))
    run = functools.partial(run_up, settings, parts, environ=environ, out=sys.stdout, err=sys.stderr)
    return trio.run(run)


def vllm_settings(command: str, flags: Flags, environ: Environ, rest: Sequence[str]) -> VllmSettings:
    """The settings of a command line, of which our parser has left the rest.

    Raises:
        UsageError: It names no model.
    """
    if not rest or rest[0].startswith("-"):
        raise UsageError(command, "name a MODEL, before any argument of vLLM")
    fallback = {"model": rest[0], "arguments": tuple(rest[1:])}
    return resolve(VllmSettings, flags=flags, environ=environ, fallback=fallback)


def takes_rest(flags: Flags) -> bool:
    """Whether a command's flags choose a vLLM in this process.

    Raises:
        InvalidConfig: The engine is unknown.
    """
    engine = flags.get(ENGINE_FLAG)
    if engine not in (None, "remote", "mock", VLLM):
        raise InvalidConfig(ENGINE_FLAG, f"{engine!r} is not allowed; --help lists what is")
    return engine == VLLM


def need_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        MissingExtra: It is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a mere directory of that name somewhere on the path has no origin
        raise MissingExtra("this command", EXTRA)  # noqa: EM101
