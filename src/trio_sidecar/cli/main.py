"""``main``: from arguments to an exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING

from trio_sidecar import __version__
from trio_sidecar.cli import commands, doctor, top, vllm
from trio_sidecar.cli.completion import SHELLS, completion
from trio_sidecar.cli.flags import FLAGS, Parser, UsageError, add_options, add_plain
from trio_sidecar.cli.layers import commands_of, layered, table_name
from trio_sidecar.cli.streams import finish_output, open_missing
from trio_sidecar.config import (
    DoctorSettings,
    FrontendSettings,
    HostSettings,
    LogSettings,
    MockSettings,
    ServerSettings,
    TopSettings,
    TransportSettings,
    UpSettings,
    VllmSettings,
    WorkerSettings,
    options_of,
)
from trio_sidecar.config.file import ConfigSettings
from trio_sidecar.errors import InvalidConfig, MissingExtra, OutputClosed, SidecarError, cause_chain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    import attrs

    from trio_sidecar.cli.layers import Layered

DEBUG_FLAG = "--debug"
RUST_COMMAND = "worker-rust"
BENCH_COMMAND = "bench"
NO_COMMAND = "name a command"
END_OF_OURS = "--"
"""What comes after it is vLLM's, even where we have a flag of that name."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
"""Like that of a process which SIGPIPE ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; the process's own unless given.

    Returns:
        0 after success, 1 after a failure at run time, 2 if arguments, variables or installation are wrong, 130 after
        Ctrl-C, 141 if what it had to say lost its reader. Failures are told to stderr.
    """
    open_missing()
    code = _run(argv)
    if (failed := finish_output()) is not None and code == EXIT_OK:
        with contextlib.suppress(OSError):
            print(f"trio-sidecar: cannot write to stdout: {failed.strerror}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    return code


def _run(argv: Sequence[str] | None) -> int:
    name, debug = "trio-sidecar", False
    layers: Layered | None = None
    classes: tuple[type[attrs.AttrsInstance], ...] = ()
    try:
        given = sys.argv[1:] if argv is None else list(argv)
        if given[:1] == [RUST_COMMAND]:  # for `up`; its arguments are the Rust tool's own, so it is not listed
            return commands.rust_worker(given[1:])
        if given[:1] == [BENCH_COMMAND]:  # its arguments are parsed where they mean something
            return commands.bench(given[1:])
        arguments, command, rest = _parse(given)
        name = command.prog
        if arguments is None:
            return EXIT_OK
        layers = arguments.layers
        _choose(arguments, command, rest)
        classes = getattr(arguments, "classes", ())
        debug = bool(layers.flags.get(DEBUG_FLAG))
        return int(arguments.run(layers.flags, layers.environ))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the last place that can turn it into an exit code
        found = _only_member(error)
        if isinstance(found, InvalidConfig):
            found = _named_by_source(found, classes, layers)
        return _tell(name, found, debug=debug)


def _named_by_source(
    error: InvalidConfig, classes: Sequence[type[attrs.AttrsInstance]], layers: Layered | None
) -> InvalidConfig:
    """The error under the name of the variable or of the file's key, if that is where the value came from.

    What is found out only at run time, such as a port in use, is told by the flag's name.
    """
    if layers is not None and (found := layers.places.get(error.setting)) is not None:
        return InvalidConfig(found, error.reason)
    flags: Mapping[str, str | bool] = layers.flags if layers is not None else {}
    for option in (source.option for cls in classes for source in options_of(cls)):
        if option.flag == error.setting and option.flag not in flags and option.env and os.environ.get(option.env):
            return InvalidConfig(option.env, error.reason)
    return error


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace | None, Parser, list[str]]:
    """What our parser knows, with the file below it, and what it does not know."""
    parser = build_parser()
    end = argv.index(END_OF_OURS) if END_OF_OURS in argv else len(argv)
    try:
        arguments, rest = parser.parse_known_args(argv[:end])
    except SystemExit:  # argparse has printed help or the version
        return None, parser, []
    rest += argv[end + 1 :]
    command: Parser = getattr(arguments, "parser", parser)
    arguments.layers = layered(parser, command, getattr(arguments, FLAGS, None) or {}, os.environ)
    return arguments, command, rest


def _choose(arguments: argparse.Namespace, command: Parser, rest: list[str]) -> None:
    """Let ``arguments.run`` be what is to be run, or refuse what nobody has asked for."""
    if arguments_take_rest(arguments):
        arguments.run = functools.partial(arguments.run_rest, rest=rest)
    else:
        command.refuse_rest(rest)
    if arguments.layers.shown:
        arguments.run = functools.partial(commands.print_config, table_name(command), arguments.layers)
    if not hasattr(arguments, "run"):
        command.print_help(sys.stderr)
        raise UsageError(command.prog, NO_COMMAND)


def arguments_take_rest(arguments: argparse.Namespace) -> bool:
    """Whether what our parser does not know is vLLM's."""
    if not hasattr(arguments, "run_rest"):
        return False
    return not hasattr(arguments, "run") or vllm.takes_rest(arguments.layers.flags)


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="trio-sidecar", description="A Dynamo worker for vLLM's gRPC contract.")
    parser.add_argument("--version", action="version", version=f"trio-sidecar {__version__}")
    added = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    up = added.add_parser("up", help="engine, worker and front end in one command", description=commands.up.__doc__)
    add_options(up, UpSettings)
    add_options(up, MockSettings, skip=commands.NOT_FOR_UP)
    _add_engine_args(up)
    add_plain(up, vllm.ENGINE_FLAG, metavar="{mock,vllm}", text=vllm.UP_ENGINE_HELP)
    add_options(up, VllmSettings)
    up.set_defaults(run=commands.up, run_rest=vllm.up_vllm, parser=up)

    worker = added.add_parser("worker", help="the Dynamo worker", description=commands.worker.__doc__)
    add_plain(worker, vllm.ENGINE_FLAG, metavar="{remote,vllm MODEL}", text=vllm.ENGINE_HELP)
    add_options(worker, WorkerSettings, HostSettings, LogSettings, VllmSettings)
    worker.set_defaults(run=commands.worker, run_rest=vllm.worker_vllm, parser=worker, classes=(WorkerSettings,))

    engine = added.add_parser("engine", help="an engine as a vLLM gRPC server")
    engine.set_defaults(parser=engine)
    engines = engine.add_subparsers(metavar="ENGINE", parser_class=Parser)
    mock = engines.add_parser("mock", help="deterministic, no GPU", description=commands.engine_mock.__doc__)
    add_options(mock, ServerSettings, MockSettings, HostSettings, LogSettings)
    _add_engine_args(mock)
    mock.set_defaults(run=commands.engine_mock, parser=mock, classes=(ServerSettings, MockSettings))

    own = engines.add_parser(
        "vllm",
        help="a vLLM in this process",
        usage="%(prog)s MODEL [our flags] [vLLM's arguments]",
        description=vllm.engine_vllm.__doc__,
        epilog=vllm.REST_HELP,
    )
    add_options(own, ServerSettings, VllmSettings, HostSettings, LogSettings)
    own.set_defaults(run_rest=vllm.engine_vllm, parser=own, classes=(ServerSettings, VllmSettings))

    frontend = added.add_parser("frontend", help="Dynamo's HTTP front end", description=commands.frontend.__doc__)
    add_options(frontend, FrontendSettings, HostSettings, LogSettings)
    frontend.set_defaults(run=commands.frontend, parser=frontend, classes=(FrontendSettings,))

    tells = added.add_parser("doctor", help="say what is broken, and where", description=doctor.doctor.__doc__)
    add_options(tells, DoctorSettings, TransportSettings)
    add_plain(tells, vllm.ENGINE_FLAG, metavar="{mock,vllm [MODEL]}", text=doctor.ENGINE_HELP)
    tells.set_defaults(run=doctor.doctor, run_rest=doctor.doctor, parser=tells, classes=(DoctorSettings,))

    shows = added.add_parser(
        "top",
        help="a live view of running workers and engines",
        usage="%(prog)s [URL ...] [flags]",
        description=top.top.__doc__,
    )
    add_options(shows, TopSettings)
    shows.set_defaults(run_rest=top.top, parser=shows, classes=(TopSettings,))

    for command in commands_of(parser):
        add_options(command, ConfigSettings)
    _add_completion(added)
    added.add_parser(BENCH_COMMAND, help="measure this worker beside others", description=commands.bench.__doc__)
    return parser


def _add_completion(added: argparse._SubParsersAction[Parser]) -> None:
    writes = added.add_parser("completion", help="a script that completes what is typed in a shell")
    writes.set_defaults(parser=writes)
    shells = writes.add_subparsers(metavar="SHELL", parser_class=Parser)
    for shell in SHELLS:
        one = shells.add_parser(shell, help=f"for {shell}", description="Write a completion script to stdout.")
        one.set_defaults(run=lambda *_, shell=shell: completion(build_parser(), shell), parser=one)


def _add_engine_args(parser: Parser) -> None:
    add_plain(
        parser,
        commands.ENGINE_ARGS_FLAG,
        metavar="JSON|PATH",
        text="Engine arguments as inline JSON or as a path; flags and variables win over it.",
    )


def _tell(name: str, error: BaseException, *, debug: bool) -> int:
    """Say what went wrong, once, and choose the exit code."""
    if debug:
        sys.excepthook(type(error), error, error.__traceback__)
    match error:
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case OutputClosed() | BrokenPipeError():
            return EXIT_NO_READER
        case UsageError():
            code, line = EXIT_USAGE, f"{error}; --help lists what is allowed"
        case InvalidConfig() | MissingExtra():
            code, line = EXIT_USAGE, f"{name}: {error}"
        case SidecarError() | OSError():
            code, line = EXIT_FAILED, f"{name}: {cause_chain(error)}"
        case _:
            if not debug:
                sys.excepthook(type(error), error, error.__traceback__)
            code, line = EXIT_FAILED, f"{name}: this is a bug in trio-sidecar: {type(error).__name__}"
    with contextlib.suppress(OSError):  # perhaps nobody reads stderr either
        print(line, file=sys.stderr)  # noqa: T201
    return code


def _only_member(error: BaseException) -> BaseException:
    """What a group holds, if it holds one thing: nurseries wrap each error once per nesting."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
