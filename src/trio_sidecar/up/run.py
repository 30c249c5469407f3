"""``trio-sidecar up``: start the three parts in order, say when they answer, and end them in order."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from trio_sidecar.bridge import open_signals
from trio_sidecar.config import UpSettings, WorkerKind
from trio_sidecar.endpoint import cannot_listen
from trio_sidecar.errors import ConnectionTimeoutError, OutputClosed, SidecarError
from trio_sidecar.http import HttpAddress
from trio_sidecar.up.chat import Answer, ask, wait_for_answer, wait_for_model
from trio_sidecar.up.child import Part
from trio_sidecar.up.report import Report
from trio_sidecar.up.supervisor import Supervisor, open_supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from typing import TextIO

# Below the range from which the kernel takes ports of outgoing connections, so that none of those can take it from us
# between the look and the front end's own bind. (The front end can be told port 0, but does not report the choice.)
PORTS = range(20_000, 32_000)
STOP_ORDER = ("worker", "front end", "engine")
# One machine, one user: a worker's requests are cut after seconds rather than minutes when the user says stop.
DEFAULT_GRACE_SECS = "0"
DEFAULT_DRAIN_SECS = "5"
STOP_SECS = 8.0
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANG_UPS = (signal.SIGHUP, signal.SIGQUIT)
"""Likewise, unless they are ignored, as under nohup."""

# Where the parts find each other is ours to say, whatever the user's environment says about a real deployment.
OWN_VARIABLES = re.compile(
    r"DYN_(DISCOVERY_BACKEND|FILE_KV|(REQUEST|RESPONSE|EVENT)_PLANE|NAMESPACE.*|COMPONENT|ENDPOINT|ENDPOINT_TYPES"
    r"|DISAGGREGATION_MODE|ROUTE_TO_ENCODER|SYSTEM_.*|HTTP_HOST|HTTP_PORT|SIDECAR_GRPC_ENDPOINT)|TRIO_SIDECAR_(LISTEN|CONFIG)"
)
SYSTEM_PORT = "DYN_SYSTEM_PORT"
# Dynamo's planes have no authentication. Its request plane obeys these; its event plane, ZMQ, advertises the address
# but still listens on every interface.
LISTEN_VARIABLES = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
LISTENING = re.compile(r"listening on (\S+)")


@attrs.frozen(slots=True, kw_only=True)
class Commands:
    """How to start each part; tests put stand-ins here.

    Attributes:
        engine: Prints ``listening on HOST:PORT`` once it serves.
        worker: Gets ``--grpc-endpoint HOST:PORT`` appended.
        frontend: Gets ``--http-host HOST --http-port PORT`` appended.
    """

    engine: tuple[str, ...]
    worker: tuple[str, ...]
    frontend: tuple[str, ...]


def own_commands(worker: WorkerKind, engine_flags: tuple[str, ...], *, engine: tuple[str, ...] = ("mock",)) -> Commands:
    """The commands of this package, run by this interpreter."""
    own = (sys.executable, "-m", "trio_sidecar")
    run_worker = (*own, "worker") if worker is WorkerKind.TRIO else (*own, "worker-rust")
    return Commands(
        engine=(*own, "engine", *engine, "--listen", "127.0.0.1:0", *engine_flags),
        worker=run_worker,
        frontend=(*own, "frontend"),
    )


def child_environment(environ: Mapping[str, str], discovery: Path) -> dict[str, str]:
    """The parts' environment: the user's, except for where they find each other: a private directory and loopback."""
    env = {name: value for name, value in environ.items() if not OWN_VARIABLES.fullmatch(name)}
    env |= dict.fromkeys(LISTEN_VARIABLES, "127.0.0.1")
    env |= {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        SYSTEM_PORT: "-1",
        "PYTHONUNBUFFERED": "1",
    }
    env.setdefault("TRIO_SIDECAR_LOG_FORMAT", "console")  # people read it here
    env.setdefault("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", DEFAULT_GRACE_SECS)
    env.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", DEFAULT_DRAIN_SECS)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy must never come between processes on one host
        env[name] = ",".join(filter(None, [env.get(name, ""), "127.0.0.1", "localhost", "::1"]))
    return env


def frontend_environment(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """The front end's environment: it unpacks model cards under its home, so it gets a private one.

    A user without a home can then run it too, and nothing is left behind. Models of a hub stay where the user has them.
    """
    own = {**env, "HOME": str(home)}
    if user_home := env.get("HOME"):
        own.setdefault("HF_HOME", str(Path(user_home, ".cache", "huggingface")))
    return own


async def run_up(
    settings: UpSettings,
    commands: Commands,
    *,
    environ: Mapping[str, str],
    out: TextIO,
    err: TextIO,
) -> int:
    """Run everything until a signal comes, a part fails, or the question is answered.

    Args:
        settings: What to run.
        commands: How to start the parts.
        environ: The environment that the parts inherit, apart from their own variables.
        out: Gets the answer, or the curl line.
        err: Gets the progress.

    Returns:
        The exit code: 0 after an answer, or after a signal that ended a service that was ready; 130 or 143 after a
        signal that came too early for that.

    Raises:
        InvalidConfig: The HTTP address cannot be listened on; nothing was started.
        PartFailed: A part ended early.
        ConnectionTimeoutError: The parts did not get ready in time.
        SidecarError: The question was not answered.
    """
    report = Report(err, verbose=settings.verbose)
    address = _http_address(settings)  # first of all: if it cannot be had, there is nothing to clean up
    up = _Up(settings=settings, commands=commands, address=address, environ=environ, out=out, report=report)
    # The signals first: none must come between the directory and whoever removes it.
    heard = [*END_SIGNALS, *(number for number in HANG_UPS if signal.getsignal(number) is not signal.SIG_IGN)]
    with open_signals(*heard) as signals, _temporary_directory(report) as directory:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            # Outside the scope, so that it hears a second signal while the parts end.
            nursery.start_soon(up.watch_signals, signals, scope)
            with scope:
                await up.serve(directory)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught and up.signal is not None:
        return 0 if up.ready and settings.ask is None else 128 + up.signal
    return 0


@attrs.define(slots=True, kw_only=True)
class _Up:
    """One run's state."""

    settings: UpSettings
    commands: Commands
    address: HttpAddress
    environ: Mapping[str, str]
    out: TextIO
    report: Report
    ready: bool = False
    signal: int | None = None
    supervisor: Supervisor | None = None
    engine_address: trio.Event = attrs.field(factory=trio.Event)
    endpoint: str = ""
    awaited: str = "engine"
    home: Path = attrs.field(factory=Path)

    async def watch_signals(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """End the run on the first signal; on the second, kill what has not ended yet."""
        async for number in signals:
            if self.signal is None:
                self.signal = number
                self.report.say(f"{signal.Signals(number).name}: stopping; once more to kill")
                scope.cancel()
            elif self.supervisor is not None:
                self.supervisor.hurry()

    async def serve(self, directory: Path) -> None:
        discovery = directory / "discovery"
        discovery.mkdir()
        env = child_environment(self.environ, discovery)
        self.home = directory / "home"
        self.home.mkdir()
        async with open_supervisor(directory, stop_order=STOP_ORDER, on_line=self._on_line) as self.supervisor:
            model = await self._start_in_time(self.supervisor, env)
            self.ready = True
            if self.settings.ask is None:
                self._say_how_to_ask(model)
                await trio.sleep_forever()
            await self._ask(model, self.settings.ask)

    async def _start_in_time(self, supervisor: Supervisor, env: dict[str, str]) -> str:
        seconds = self.settings.startup_secs
        with trio.move_on_after(seconds):
            return await self._start(supervisor, env)
        name = self.awaited
        tails = [child.tail for child in supervisor.children if child.part.name == name]
        tail = "".join(f"\n  {name}: {line}" for lines in tails for line in lines)
        last = f"; the last output of the {name} was:{tail}" if tail else f"; the {name} said nothing"
        msg = f"not ready after {seconds:g} s{last}"
        raise ConnectionTimeoutError(msg)

    async def _start(self, supervisor: Supervisor, env: dict[str, str]) -> str:
        address = self.address
        with self.report.stage("engine", "starting") as stage:
            supervisor.start(Part(name="engine", argv=self.commands.engine, env=env))
            await self.engine_address.wait()
            stage.outcome = f"listening on {self.endpoint}"
        with self.report.stage("front end", "starting") as stage:
            frontend = frontend_environment(env, self.home)
            listen = ("--http-host", address.host, "--http-port", str(address.port))
            supervisor.start(Part(name="front end", argv=(*self.commands.frontend, *listen), env=frontend))
            # The worker needs no front end, so both start at once.
            worker = (*self.commands.worker, "--grpc-endpoint", self.endpoint)
            supervisor.start(Part(name="worker", argv=worker, env=self._worker_environment(env), stop_secs=STOP_SECS))
            self.awaited = "front end"
            await _wait_for_port(address)
            stage.outcome = f"listening on http://{address}"
        with self.report.stage("worker", "registering") as stage:
            self.awaited = "front end"  # it is the one that fetches the model's card and lists it
            model = await wait_for_model(address)
            stage.outcome = f"serving {model}"
        with self.report.stage("answer", "asking for one token"):
            await wait_for_answer(address, model)
        return model

    def _worker_environment(self, env: dict[str, str]) -> dict[str, str]:
        port = self.settings.system_port
        return env if port is None else {**env, SYSTEM_PORT: str(port)}

    def _on_line(self, part: str, line: str) -> None:
        self.report.on_line(part, line)
        if part == "engine" and not self.engine_address.is_set() and (found := LISTENING.search(line)):
            self.endpoint = found[1]
            self.engine_address.set()

    async def _ask(self, model: str, question: str) -> None:
        self.report.say()

        write = self._write
        try:
            answer: Answer = await ask(self.address, model, question, write)
        except BaseException:
            with contextlib.suppress(OutputClosed):
                write("\n")
            raise
        write("\n")
        count = "" if answer.completion_tokens is None else f"{answer.completion_tokens} tokens, "
        self.report.say(f"\n  {count}finish reason {answer.finish_reason}")

    def _say_how_to_ask(self, model: str) -> None:
        self.report.say("\nReady; Ctrl-C ends it. Try:\n")
        self._write(curl_line(self.address, model) + "\n")
        if (port := self.settings.system_port) is not None:
            self._write(f"trio-sidecar top 127.0.0.1:{port}\n")

    def _write(self, text: str) -> None:
        """Write to whoever asked.

        Raises:
            OutputClosed: Nobody reads it.
        """
        encoding = self.out.encoding or "utf-8"  # of the locale, which may lack characters of the answer
        try:
            self.out.write(text.encode(encoding, errors="replace").decode(encoding))
            self.out.flush()
        except BrokenPipeError as error:
            msg = "nobody reads stdout"
            raise OutputClosed(msg) from error


def curl_line(address: HttpAddress, model: str) -> str:
    """A command to paste into a shell."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    url = f"http://{address}/v1/chat/completions"
    return f"curl --noproxy '*' -N {url} -H 'content-type: application/json' -d {shlex.quote(body)}"


def _http_address(settings: UpSettings) -> HttpAddress:
    """The address given, or a free port.

    Raises:
        InvalidConfig: The port is taken or not ours to take; asking now beats talking to whoever has it.
        SidecarError: No port was free in a hundred tries.
    """
    host, port = settings.http_host, settings.http_port
    for candidate in random.sample(PORTS, 100) if port is None else [port]:
        failed = _bind_error(host, candidate)
        if failed is None:
            return HttpAddress(host, candidate)
        if port is not None or failed.errno != errno.EADDRINUSE:
            raise cannot_listen(failed, HttpAddress(host, candidate))
    msg = f"a hundred ports of {host} are all in use"
    raise SidecarError(msg)


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


async def _wait_for_port(address: HttpAddress) -> None:
    while True:
        try:
            stream = await trio.open_tcp_stream(address.host, address.port)
        except OSError:
            await trio.sleep(0.05)
        else:
            await stream.aclose()
            return


def _only_lost_its_reader(error: Exception) -> bool:
    """Whether the failure, which nurseries wrap in groups, is nothing but that."""
    if isinstance(error, ExceptionGroup):
        return all(map(_only_lost_its_reader, error.exceptions))
    return isinstance(error, OutputClosed)


@contextmanager
def _temporary_directory(report: Report) -> Iterator[Path]:
    """A private directory; kept, and named, if the run fails, because the logs are in it."""
    directory = Path(tempfile.mkdtemp(prefix="trio-sidecar-up-"))
    try:
        yield directory
    except Exception as error:
        if _only_lost_its_reader(error):
            shutil.rmtree(directory, ignore_errors=True)
            raise
        report.say(f"The logs are in {directory}")
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    else:
        shutil.rmtree(directory, ignore_errors=True)
