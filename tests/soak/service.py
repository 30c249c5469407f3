"""The service that is soaked: real processes, with a bad network between worker and engine."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from soak.verdict import Quiet, Sample
from support import peers
from support.faults import ProxyThread, proxy_thread
from support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.processes import Child

MODEL = "mock"
SNAPSHOT_SECONDS = 10
REST_SECONDS = 30
PAGE_BYTES = 4096
ENGINE_FLAGS = {
    "--served-model-name": MODEL,
    "--ttft-ms": 5,
    "--itl-ms": 2,
    "--max-model-len": 8192,
    "--num-gpu-blocks": 1024,  # soon full, so that its memory is too
    "--log-level": "info",
}
WORKER_ARGUMENTS = (
    "--keepalive-secs=1",
    "--keepalive-timeout-secs=1",
    "--grpc-connections=4",
    "--grpc-connect-attempt-timeout-secs=2",
)


@attrs.define(eq=False, kw_only=True)
class Soaked:
    """The running service.

    Attributes:
        url: The front end's.
        engine: Our engine server; replaced by :meth:`restart_engine`.
        worker: Our worker.
        frontend: Dynamo's front end; it is looked at, but not judged.
        proxy: The network between worker and engine.
        restarts: How many engines there were before this one.
    """

    url: str
    engine: peers.Engine
    worker: Child
    frontend: Child
    proxy: ProxyThread
    directory: Path
    restarts: int = 0
    _read: dict[Path, int] = attrs.field(factory=dict)

    def restart_engine(self) -> None:
        """Kill the engine as a crash would, and start another one on its port."""
        self.engine.process.send(signal.SIGKILL)
        self.engine.process.close(seconds=0)
        self.restarts += 1
        self.engine = start_engine(self.directory / f"engine-{self.restarts}", self.engine.port)

    def close_engine(self) -> None:
        """End the engine that runs now."""
        self.engine.close()

    def sample(self, at: float) -> list[Sample]:
        """What the kernel says about each process now."""
        named = {"worker": self.worker, "engine": self.engine.process, "frontend": self.frontend}
        return [sample(child.pid, name, at) for name, child in named.items() if child.running]

    async def at_rest(self, at: float, requests: int) -> list[Quiet]:
        """Wait until worker and engine hold no request and nothing changes any more, and take that down.

        Raises:
            TooSlowError: They do not come to rest.
        """
        named = {"worker": self.worker, "engine": self.engine.process}
        found = []
        with trio.fail_after(REST_SECONDS):
            for name, child in named.items():
                last: dict[str, Any] = {}
                while True:
                    now = await self._snapshot(child, f"{'worker' if name == 'worker' else 'server'}_snapshot")
                    if idle(now) and all(
                        now[key] == last.get(key) for key in ("trio_tasks", "aio_tasks", "open_files")
                    ):
                        break
                    last = now
                    await trio.sleep(0.5)
                counts = {key: now[key] for key in ("trio_tasks", "aio_tasks", "open_files", "objects")}
                found.append(Quiet(at=at, process=name, requests=requests, **counts))
        return found

    async def _snapshot(self, child: Child, event: str) -> dict[str, Any]:
        """The snapshot that a process logs at SIGUSR1."""
        self._new_lines(child)
        child.send(signal.SIGUSR1)
        with trio.fail_after(SNAPSHOT_SECONDS):
            while True:
                for line in self._new_lines(child):
                    if f'"event": "{event}"' in line:
                        snapshot: dict[str, Any] = json.loads(line)
                        return snapshot
                await trio.sleep(0.02)

    def _new_lines(self, child: Child) -> list[str]:
        """Whole lines that it has logged since the last look."""
        with child.log_path.open("rb") as log:
            log.seek(self._read.get(child.log_path, 0))
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[child.log_path] = self._read.get(child.log_path, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()


def idle(snapshot: dict[str, Any]) -> bool:
    """Whether a process holds no request; health checks of the worker's are calls too, and come and go."""
    if "requests" in snapshot:
        return bool(snapshot["requests"]["open"] == 0)
    return bool(snapshot["calls"] == 0)


def sample(pid: int, name: str, at: float) -> Sample:
    """What the kernel says about a process."""
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Sample(
        at=at,
        process=name,
        rss_bytes=int(status[21]) * PAGE_BYTES,
        open_files=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=int(status[17]),
    )


def start_engine(logs: Path, port: int) -> peers.Engine:
    """Start our engine server."""
    return peers.start_mock_server(ENGINE_FLAGS, log_dir=logs, port=port)


@contextlib.contextmanager
def open_soaked(directory: Path) -> Iterator[Soaked]:
    """Start everything; ready when the front end lists the model. At the end each part has to end by itself."""
    discovery, logs = directory / "discovery", directory / "logs"
    with contextlib.ExitStack() as cleanup:
        engine = start_engine(directory / "engine-0", free_port())
        cleanup.callback(engine.close)
        proxy = cleanup.enter_context(proxy_thread(engine.port))
        frontend = peers.start_frontend(discovery=discovery, log_dir=logs)
        cleanup.callback(frontend.process.close, seconds=1)
        worker = peers.start_worker(
            f"127.0.0.1:{proxy.port}", discovery=discovery, log_dir=logs, arguments=WORKER_ARGUMENTS, DYN_LOG="warn"
        )
        cleanup.callback(worker.close, seconds=5)
        peers.wait_for_model(frontend, MODEL, [worker])
        service = Soaked(
            url=frontend.url,
            engine=engine,
            worker=worker,
            frontend=frontend.process,
            proxy=proxy,
            directory=directory,
        )
        cleanup.callback(service.close_engine)
        yield service
        worker.send(signal.SIGTERM)
        assert worker.wait(seconds=60) == 0
        service.engine.process.send(signal.SIGTERM)
        assert service.engine.process.wait(seconds=60) == 0
