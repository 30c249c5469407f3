"""One function for each command: settings from flags and variables, then one call.

Imports are late, to keep ``--help`` fast and free of extras.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trio_sidecar.config import (
    FrontendSettings,
    HostSettings,
    LogSettings,
    MockSettings,
    ServerSettings,
    UpSettings,
    WorkerKind,
    WorkerSettings,
    options_of,
    parse_engine_args,
    resolve,
)
from trio_sidecar.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import attrs

    from trio_sidecar.cli.layers import Layered

    Flags = Mapping[str, str | bool]
    Environ = Mapping[str, str]

ENGINE_ARGS_FLAG = "--extra-engine-args"
DYNAMO_EXTRA = "dynamo"
WORKER_SERVICE = "trio-sidecar-worker"
ENGINE_SERVICE = "trio-sidecar-engine"
ANY_ENDPOINT = {"--grpc-endpoint": "127.0.0.1:1"}
NOT_FOR_UP = ("--disaggregation-mode",)


def up(flags: Flags, environ: Environ) -> int:
    """Start a mock engine, a worker and a front end on this machine, and end all of them together."""
    settings = resolve(UpSettings, flags=flags, environ=environ)
    resolve(MockSettings, flags=flags, environ=environ, fallback=_engine_args(flags))
    check_parts(settings, environ)
    need_dynamo("this command")
    import trio  # noqa: PLC0415

    from trio_sidecar.up.run import own_commands, run_up  # noqa: PLC0415

    parts = own_commands(settings.worker, flags_again(flags, MockSettings))
    run = functools.partial(run_up, settings, parts, environ=environ, out=sys.stdout, err=sys.stderr)
    return trio.run(run)


def worker(flags: Flags, environ: Environ) -> int:
    """Register a model with Dynamo and serve it from an engine's vLLM gRPC endpoint."""
    settings = resolve(WorkerSettings, flags=flags, environ=environ)
    host = resolve(HostSettings, flags=flags, environ=environ)
    log = resolve(LogSettings, flags=flags, environ=environ)
    from trio_sidecar.tls import check_client  # noqa: PLC0415

    check_client(settings.transport.tls)
    need_dynamo("this command")
    start_logging(log)
    from trio_sidecar.bridge import Host, run  # noqa: PLC0415
    from trio_sidecar.tracing import open_tracer  # noqa: PLC0415
    from trio_sidecar.worker import run_worker  # noqa: PLC0415

    with open_tracer(environ, WORKER_SERVICE) as tracer:
        main = functools.partial(run_worker, settings, tracer=tracer, process_ends_after=True)
        return run(main, host=Host(host.host_loop.value))


def engine_mock(flags: Flags, environ: Environ) -> int:
    """Serve a deterministic engine without GPU over vLLM's gRPC contract; prints the address that it listens on."""
    settings = resolve(MockSettings, flags=flags, environ=environ, fallback=_engine_args(flags))
    server = resolve(ServerSettings, flags=flags, environ=environ)
    host = resolve(HostSettings, flags=flags, environ=environ)
    start_logging(resolve(LogSettings, flags=flags, environ=environ))
    from trio_sidecar.bridge import Host, run  # noqa: PLC0415
    from trio_sidecar.engines.mock import open_mock  # noqa: PLC0415
    from trio_sidecar.server import run_server  # noqa: PLC0415
    from trio_sidecar.tracing import open_tracer  # noqa: PLC0415

    with open_tracer(environ, ENGINE_SERVICE) as tracer:
        main = functools.partial(run_server, open_mock(settings), server, print_address, tracer=tracer)
        run(main, host=Host(host.host_loop.value))
    return 0


def frontend(flags: Flags, environ: Environ) -> int:
    """Run Dynamo's OpenAI-compatible HTTP front end."""
    settings = resolve(FrontendSettings, flags=flags, environ=environ)
    host = resolve(HostSettings, flags=flags, environ=environ)
    log = resolve(LogSettings, flags=flags, environ=environ)
    need_dynamo("this command")
    start_logging(log)
    from trio_sidecar.bridge import Host, run  # noqa: PLC0415
    from trio_sidecar.worker.frontend import run_frontend  # noqa: PLC0415

    return run(functools.partial(run_frontend, settings, process_ends_after=True), host=Host(host.host_loop.value))


def rust_worker(arguments: Sequence[str]) -> int:
    """Run the Rust sidecar that the Dynamo wheel ships, with its own arguments."""
    need_dynamo("the Rust sidecar")
    from trio_sidecar.worker.rust import run_rust_worker  # noqa: PLC0415

    return run_rust_worker(arguments)


def bench(arguments: Sequence[str]) -> int:
    """Measure this worker beside the Rust sidecar and others, on this machine, with the same loads, in turn."""
    need_dynamo("this command")
    from trio_sidecar_bench.cli import main  # noqa: PLC0415

    return main(arguments)


def print_config(table: str, layers: Layered, _flags: Flags, _environ: Environ) -> int:
    """Write the settings that a command would run with."""
    from trio_sidecar.cli.show import shown  # noqa: PLC0415

    sys.stdout.write(shown(table, layers) + "\n")
    return 0


def _engine_args(flags: Flags) -> dict[str, object]:
    text = flags.get(ENGINE_ARGS_FLAG)
    return parse_engine_args(text) if isinstance(text, str) else {}


def check_parts(settings: UpSettings, environ: Environ) -> None:
    """Check the variables that the parts of ``up`` will read, so that a wrong one fails here, not in a child.

    Raises:
        InvalidConfig: A value is not allowed.
    """
    from trio_sidecar.tracing import trace_settings  # noqa: PLC0415
    from trio_sidecar.up.run import child_environment  # noqa: PLC0415

    trace_settings(environ)
    inherited = child_environment(environ, Path())
    for cls in (HostSettings, LogSettings, ServerSettings):
        resolve(cls, flags={}, environ=inherited)
    if settings.worker is WorkerKind.TRIO:  # the Rust sidecar reads its own
        resolve(WorkerSettings, flags=ANY_ENDPOINT, environ=inherited)


def flags_again(flags: Flags, cls: type[attrs.AttrsInstance]) -> tuple[str, ...]:
    """The given flags of a settings class, as arguments for a child; a switch that a file has off is left out."""
    known = {source.option.flag for source in options_of(cls)} | {ENGINE_ARGS_FLAG}
    given = [(flag, value) for flag, value in flags.items() if flag in known and value is not False]
    return tuple(flag if value is True else f"{flag}={value}" for flag, value in given)


def need_dynamo(command: str) -> None:
    """Refuse to go on without Dynamo's runtime.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        found = importlib.util.find_spec("dynamo._core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingExtra(command, DYNAMO_EXTRA)


def start_logging(settings: LogSettings) -> None:
    """Configure the logs of this process, Dynamo's included."""
    from trio_sidecar.observe.logging import calm_dynamo, configure_logging  # noqa: PLC0415

    calm_dynamo(os.environ, settings, tty=sys.stderr.isatty())
    configure_logging(settings)


def print_address(address: str) -> None:
    """Say where a server listens."""
    with contextlib.suppress(BrokenPipeError):  # who does not listen misses nothing that the log does not say
        print(f"listening on {address}", flush=True)  # noqa: T201 - what the command is asked to print
