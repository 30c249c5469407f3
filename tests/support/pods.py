"""The pods of a manifest as processes of this machine: what kubelet would start, probe and end, in that order."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import attrs
import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support import peers
from support.deployment import POD_ADDRESS, VLLM_FLAGS, Container, containers
from support.processes import Child, free_port
from trio_sidecar.config import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 40
HERE = "127.0.0.1"


@attrs.frozen(slots=True, kw_only=True)
class Running:
    """A container that runs.

    Attributes:
        container: As the manifest has it.
        process: What runs.
        ports: Where its ports are on this machine, by their numbers in the manifest.
    """

    container: Container
    process: Child
    ports: dict[int, int]

    def port(self, reference: int | str) -> int:
        """Where a port is on this machine."""
        return self.ports[self.container.port(reference)]

    def probe(self, name: str) -> bool:
        """Whether a probe of the manifest succeeds now."""
        probe = self.container.spec[name]
        seconds = probe.get("timeoutSeconds", 1)
        if "grpc" in probe:
            return _serves(self.port(probe["grpc"]["port"]), probe["grpc"]["service"], seconds)
        asked = probe["httpGet"]
        url = f"http://{HERE}:{self.port(asked['port'])}{asked['path']}"
        try:
            answer = httpx2.get(url, timeout=seconds, trust_env=False)
        except httpx2.TransportError:
            return False
        return answer.status_code == httpx2.codes.OK

    def wait_for_probes(self) -> None:
        """Wait until all of its probes succeed."""
        names = [name for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in self.container.spec]
        self.process.wait_until(lambda: all(map(self.probe, names)), f"{names} succeed", seconds=SECONDS)


def _serves(port: int, service: str, seconds: float) -> bool:
    with grpc.insecure_channel(f"{HERE}:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@attrs.frozen(slots=True, kw_only=True)
class Deployment:
    """All that a manifest starts.

    Attributes:
        pods: One per workload with an engine: engine and worker.
        frontend: The front end.
    """

    pods: tuple[tuple[Running, Running], ...]
    frontend: Running

    def ask(self, **body: Any) -> httpx2.Response:
        """One completion through the front end."""
        url = f"http://{HERE}:{self.frontend.port('http')}/v1/completions"
        asked = {"model": "mocker-model", "prompt": [5, 6, 7, 8], "max_tokens": 3} | body
        return httpx2.post(url, json=asked, timeout=SECONDS, trust_env=False)

    def end_pods(self) -> list[tuple[int, int]]:
        """End all pods at once, as kubelet does, each within its own grace period.

        Returns:
            The exit codes of worker and engine, pod by pod.
        """
        limits = [time.monotonic() + worker.container.pod["terminationGracePeriodSeconds"] for _, worker in self.pods]
        for _, worker in self.pods:
            worker.process.send(signal.SIGTERM)
        codes = []
        for (engine, worker), limit in zip(self.pods, limits, strict=True):
            first = worker.process.wait(seconds=limit - time.monotonic())
            assert engine.process.running  # it outlives the worker
            engine.process.send(signal.SIGTERM)
            codes.append((first, engine.process.wait(seconds=limit - time.monotonic())))
        return codes


@contextlib.contextmanager
def running_manifest(path: Path, directory: Path) -> Iterator[Deployment]:
    """Start one pod of each workload of a manifest; ready once all probes succeed and a request is answered.

    The mock engine stands for vLLM, a directory for etcd, the loopback address for the pods', and free ports for the
    manifest's, because here all pods share one network.
    """
    with contextlib.ExitStack() as cleanup:

        def start(container: Container, arguments: list[str], ports: dict[int, int], name: str) -> Running:
            argv = [sys.executable, "-m", "trio_sidecar", *arguments]
            child = Child(name, argv, env=_environment(container, directory, ports), log_dir=directory)
            cleanup.callback(child.close, seconds=1)
            return Running(container=container, process=child, ports=ports)

        (front,) = containers(path, name="frontend")
        ports = {front.port("http"): free_port()}
        frontend = start(front, _moved(front.spec["args"], ports), ports, "frontend")
        pods = []
        pairs = zip(containers(path, name="engine"), containers(path, name="worker"), strict=True)
        for number, (engine, worker) in enumerate(pairs):
            assert engine.template == worker.template
            exposed = [port["containerPort"] for one in (engine, worker) for port in one.spec["ports"]]
            ports = {port: free_port() for port in exposed}
            first = start(engine, _mock(engine, worker, ports), ports, f"engine-{number}")
            first.wait_for_probes()
            second = start(worker, _moved(worker.spec["args"], ports), ports, f"worker-{number}")
            second.wait_for_probes()
            pods.append((first, second))
        frontend.wait_for_probes()
        found = Deployment(pods=tuple(pods), frontend=frontend)
        frontend.process.wait_until(
            lambda: found.ask().status_code == httpx2.codes.OK, "a first answer", seconds=SECONDS
        )
        yield found


def _moved(arguments: list[str], ports: dict[int, int]) -> list[str]:
    """Arguments with the manifest's ports replaced by this machine's."""
    return [re.sub(r"\d+", lambda found: str(ports.get(int(found[0]), found[0])), part) for part in arguments]


def _environment(container: Container, directory: Path, ports: dict[int, int]) -> dict[str, str]:
    own = container.environment
    own.pop("ETCD_ENDPOINTS", None)
    if "DYN_SYSTEM_PORT" in own:
        own["DYN_SYSTEM_PORT"] = str(ports[int(own["DYN_SYSTEM_PORT"])])
    here = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / "discovery"),
        "HF_HOME": str(directory / "models"),
        "TRIO_SIDECAR_LOG_LEVEL": "debug",
    }
    return peers.environment() | {name: value.replace(POD_ADDRESS, HERE) for name, value in own.items()} | here


def _mock(engine: Container, worker: Container, ports: dict[int, int]) -> list[str]:
    """The mock engine's command line in the place of vLLM's."""
    model, *rest = engine.command_line.rest
    kept = [part for part in engine.spec["args"] if part != model and part.partition("=")[0] not in VLLM_FLAGS]
    assert ["engine", "vllm"] == kept[:2]
    role = worker.command_line.settings(WorkerSettings).disaggregation_mode
    added = [f"--disaggregation-mode={role.value}"]
    if any(flag.startswith("--kv-events-config") for flag in rest):
        added.append("--extra-engine-args=" + json.dumps({"zmq_kv_events_port": ports[engine.port("kv-events")]}))
    return ["engine", "mock", *_moved(kept[2:], ports), *added]
