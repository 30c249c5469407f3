"""``up`` as a whole, with stand-ins for the three parts."""

from __future__ import annotations

import io
import os
import shlex
import signal
import socket
import tempfile
from pathlib import Path

import attrs
import pytest
import trio

from support.stand_ins import ANSWER, ENGINE, FRONTEND, IGNORE_SIGTERM, SLEEP, commands
from trio_sidecar.config import UpSettings, WorkerKind
from trio_sidecar.errors import ConnectionTimeoutError, InvalidConfig, OutputClosed
from trio_sidecar.http import HttpAddress
from trio_sidecar.up.chat import AskFailed
from trio_sidecar.up.child import PartFailed
from trio_sidecar.up.run import Commands, child_environment, curl_line, frontend_environment, own_commands, run_up


@attrs.frozen(slots=True)
class Run:
    """One run and what it wrote."""

    directory: Path
    out: io.StringIO = attrs.field(factory=io.StringIO)
    err: io.StringIO = attrs.field(factory=io.StringIO)

    async def up(self, parts: Commands, settings: UpSettings | None = None) -> int:
        """Run it; a single error comes without its groups."""
        error: BaseException | None = None
        try:
            with trio.fail_after(15):
                return await run_up(settings or UpSettings(), parts, environ=os.environ, out=self.out, err=self.err)
        except BaseExceptionGroup as group:
            error = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error

    async def signal_when(self, text: str, *numbers: int) -> None:
        """Send ourselves signals once the text has been written."""
        for number in numbers:
            while text not in self.err.getvalue() + self.out.getvalue():  # noqa: ASYNC110 - another process's doing
                await trio.sleep(0.01)
            os.kill(os.getpid(), number)
            text = "stopping"

    @property
    def left_overs(self) -> list[str]:
        """Temporary directories that are still there."""
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose temporary directories can be looked at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Run(tmp_path)


def children() -> list[int]:
    """Processes whose parent we are."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def test_ask_streams_the_answer_and_ends(run: Run) -> None:
    """Only the answer is on stdout; progress names each part; nothing stays behind."""
    assert 0 == await run.up(commands(), UpSettings(ask="Hello?"))

    assert "Hello\n" == run.out.getvalue()
    for words in (
        "engine     listening on 127.0.0.1:5 (",
        "front end  listening on http://127.0.0.1:",
        "worker     serving m (",
    ):
        assert words in run.err.getvalue()
    assert "2 tokens, finish reason stop" in run.err.getvalue()
    assert ([], []) == (children(), run.left_overs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_ends_a_running_service_cleanly(run: Run, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a closed terminal: exit code 0, nothing stays behind; before, it said how to ask."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.signal_when, "curl", number)
        assert 0 == await run.up(commands())

    assert run.out.getvalue().startswith("curl --noproxy '*' -N http://127.0.0.1:")
    assert f"{number.name}: stopping" in run.err.getvalue()
    assert ([], []) == (children(), run.left_overs)


async def test_nohup_is_heeded(run: Run) -> None:
    """What was started to survive its terminal does."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.signal_when, "curl", signal.SIGHUP)
            nursery.start_soon(run.signal_when, "curl", signal.SIGTERM)
            assert 0 == await run.up(commands())
    finally:
        signal.signal(signal.SIGHUP, earlier)

    assert "SIGHUP" not in run.err.getvalue()


class Unread(io.StringIO):
    """An output whose reader has gone away."""

    def write(self, text: str) -> int:
        """Fail as a pipe does."""
        raise BrokenPipeError


@pytest.mark.parametrize("settings", [UpSettings(ask="Hello?"), UpSettings()], ids=["answer", "service"])
async def test_a_reader_that_goes_away_is_no_failure_to_look_into(run: Run, settings: UpSettings) -> None:
    """Everything ends, and no logs are kept for that."""
    unread = attrs.evolve(run, out=Unread())
    with pytest.raises(OutputClosed):
        await unread.up(commands(), settings)

    assert "The logs are in" not in run.err.getvalue()
    assert ([], []) == (children(), run.left_overs)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_during_start_up_ends_it(run: Run, number: int, code: int) -> None:
    """Whoever interrupts the start learns that it was interrupted."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.signal_when, "engine", number)
        assert code == await run.up(commands(frontend=SLEEP))

    assert ([], []) == (children(), run.left_overs)


async def test_a_second_signal_kills(run: Run) -> None:
    """A part that does not listen does not keep an impatient user."""
    deaf = str(run.directory / "deaf")
    worker = f"{IGNORE_SIGTERM}; open({deaf!r}, 'w'); {SLEEP}"
    # The service is ready when the worker is: before, it would still heed SIGTERM.
    wait = f"import os, time\nwhile not os.path.exists({deaf!r}): time.sleep(0.01)\n"
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.signal_when, "curl", signal.SIGINT, signal.SIGINT)
        assert 0 == await run.up(commands(worker=worker, frontend=wait + FRONTEND.format(answer=ANSWER)))

    assert (run.directory / "deaf").exists()
    assert 5 > trio.current_time() - start
    assert [] == children()


@pytest.mark.parametrize("name", ["engine", "worker", "front end"])
async def test_a_part_that_fails_at_the_start_says_why(run: Run, name: str) -> None:
    """The error names the part, its exit code and its last output; the logs are kept and named."""
    failing = commands(**{name.replace(" ", ""): "print('port taken'); raise SystemExit(3)"})
    with pytest.raises(PartFailed) as caught:
        await run.up(failing)

    assert f"the {name} exited with code 3; its last output was:\n  {name}: port taken" == str(caught.value)
    assert f"The logs are in {run.directory / run.left_overs[0]}" in run.err.getvalue()
    assert [] == children()


async def test_a_part_that_dies_later_ends_the_rest(run: Run) -> None:
    """A service without one of its parts is over, and says which."""
    dying = "print('listening on 127.0.0.1:5', flush=True); import time; time.sleep(1.5); raise SystemExit(9)"
    with pytest.raises(PartFailed, match="the engine exited with code 9"):
        await run.up(commands(engine=dying))

    assert [] == children()


async def test_start_up_is_bounded(run: Run) -> None:
    """A part that never gets ready is named, with what it said."""
    mute = f"print('loading', flush=True); {SLEEP}"
    with pytest.raises(
        ConnectionTimeoutError, match=r"not ready after 0\.5 s; the last output of the engine was:\n  engine: loading"
    ):
        await run.up(commands(engine=mute), UpSettings(startup_secs=0.5))

    assert [] == children()


async def test_a_question_that_fails_is_an_error(run: Run) -> None:
    """An error in mid-stream is not taken for an answer."""
    answer = 'data: {"choices": [{"delta": {"content": "He"}}]}\n\ndata: {"error": {"message": "engine gone"}}\n\n'
    with pytest.raises(AskFailed, match="engine gone"):
        await run.up(commands(answer=answer), UpSettings(ask="Hello?"))

    assert "He\n" == run.out.getvalue()
    assert [] == children()


async def test_a_given_port_that_is_taken_is_refused(run: Run) -> None:
    """Whoever listens there already is not asked by mistake; nothing is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"--http-port: 127.0.0.1:{port} is in use by another socket"):
            await run.up(commands(), UpSettings(http_port=port))

    assert ("", [], []) == (run.err.getvalue(), children(), run.left_overs)


async def test_verbose_shows_the_parts_output(run: Run) -> None:
    """Each line with its part's name."""
    await run.up(commands(engine=f"print('first words', flush=True); {ENGINE}"), UpSettings(ask="x", verbose=True))

    assert "engine | first words" in run.err.getvalue()


def test_parts_find_each_other_whatever_the_user_has_set() -> None:
    """Variables that place a worker in a real deployment do not reach the parts; the others do."""
    user = {
        "PATH": "/bin",
        "DYN_LOG": "debug",
        "DYN_NAMESPACE": "prod",
        "DYN_NAMESPACE_WORKER_SUFFIX": "a",
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "nats",
        "DYN_SYSTEM_PORT": "9090",
        "DYN_HTTP_PORT": "80",
        "DYN_SIDECAR_GRPC_ENDPOINT": "prod:1",
        "DYN_DISAGGREGATION_MODE": "decode",
        "DYN_SIDECAR_GRPC_CONNECTIONS": "2",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "60",
        "NO_PROXY": "corp",
    }

    assert {
        "PATH": "/bin",
        "DYN_LOG": "debug",
        "DYN_SIDECAR_GRPC_CONNECTIONS": "2",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": "/d",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_SYSTEM_PORT": "-1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "TRIO_SIDECAR_LOG_FORMAT": "console",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "60",
        "NO_PROXY": "corp,127.0.0.1,localhost,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
    } == child_environment(user, Path("/d"))


def test_front_end_home() -> None:
    """The front end unpacks model cards in a private home; a hub's models stay where the user has them."""
    private = Path("/d/home")

    assert {"HOME": "/d/home", "HF_HOME": "/home/u/.cache/huggingface"} == frontend_environment(
        {"HOME": "/home/u"}, private
    )
    assert {"HOME": "/d/home", "HF_HOME": "/models"} == frontend_environment(
        {"HOME": "/home/u", "HF_HOME": "/models"}, private
    )
    assert {"HOME": "/d/home"} == frontend_environment({}, private)


def test_our_own_commands() -> None:
    """Flags go to the engine; the worker is ours or the Rust sidecar."""
    ours = own_commands(WorkerKind.TRIO, ("--seed=1",))
    rust = own_commands(WorkerKind.RUST, ())

    assert ("engine", "mock", "--listen", "127.0.0.1:0", "--seed=1") == ours.engine[3:]
    assert (("worker",), ("worker-rust",)) == (ours.worker[3:], rust.worker[3:])


def test_curl_line_can_be_pasted() -> None:
    """A shell reads it as one command whose body is JSON, whatever the model is called."""
    words = shlex.split(curl_line(HttpAddress("127.0.0.1", 8000), "it's"))

    assert ["curl", "--noproxy", "*", "-N", "http://127.0.0.1:8000/v1/chat/completions"] == words[:5]
    assert '"model": "it\'s"' in words[-1]
