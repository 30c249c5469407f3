"""How each real peer of the tests is started; every function returns once the peer is ready."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import grpc
import httpx2

from support.processes import Child, ChildFailed, free_port
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
VLLM_RS_VARIABLE = "TRIO_SIDECAR_VLLM_RS"
INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "COVERAGE_PROCESS_START")
RUST_SIDECAR = "import sys; from dynamo._core import backend; backend._run_vllm_sidecar(sys.argv[1:])"


def environment(**extra: str) -> dict[str, str]:
    """A child's environment: only what a process needs to run, so that the tester's own settings change nothing."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | {"PYTHONUNBUFFERED": "1"} | extra


def dynamo_environment(discovery: Path, **extra: str) -> dict[str, str]:
    """The environment of Dynamo's processes that find each other through a directory, without etcd or NATS."""
    return environment(
        DYN_DISCOVERY_BACKEND="file",
        DYN_FILE_KV=str(discovery),
        DYN_REQUEST_PLANE="tcp",
        DYN_EVENT_PLANE="zmq",
        DYN_SYSTEM_PORT="-1",
        **extra,
    )


def vllm_rs_binary() -> Path:
    """The real server's binary.

    Raises:
        RuntimeError: The variable that names it is unset or wrong; a test that needs it must fail, not be skipped.
    """
    name = os.environ.get(VLLM_RS_VARIABLE, "")
    if not name or not os.access(name, os.X_OK):
        msg = f"{VLLM_RS_VARIABLE}={name!r} must name the vllm-rs binary; `nox -s conformance` fetches it and sets this"
        raise RuntimeError(msg)
    return Path(name)


@attrs.frozen(slots=True, kw_only=True)
class Engine:
    """A running gRPC engine."""

    process: Child
    port: int
    core: Child | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop it."""
        self.process.close(seconds=3)
        if self.core:
            self.core.close(seconds=1)


def start_vllm_rs(
    model: Path, served_name: str, reply: Sequence[int], *, log_dir: Path, tokens_per_second: float = 0, port: int = 0
) -> Engine:
    """Start the real ``vllm-rs`` server over the mock core, on a free port unless one is given."""
    port, http, handshake = port or free_port(), free_port(), free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    reply_file = log_dir / "reply.json"
    reply_file.write_text(json.dumps(list(reply)))
    flags = {
        "--host": "127.0.0.1",
        "--port": http,
        "--grpc-port": port,
        "--served-model-name": served_name,
        "--max-model-len": json.loads((model / "config.json").read_text())["max_position_embeddings"],
        "--data-parallel-size-local": 0,
        "--data-parallel-size": 1,
        "--data-parallel-address": "127.0.0.1",
        "--data-parallel-rpc-port": handshake,
        "--tool-call-parser": "none",
        "--reasoning-parser": "none",
    }
    env = environment(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    argv: list[str | Path] = [vllm_rs_binary(), "serve", model, *(str(part) for pair in flags.items() for part in pair)]
    server = Child("vllm-rs", argv, env=env, log_dir=log_dir)
    core = None
    try:
        core = Child(
            "vllm-core",
            [
                sys.executable,
                HERE / "vllm_core_mock.py",
                f"--handshake-port={handshake}",
                f"--reply={reply_file}",
                f"--tokens-per-second={tokens_per_second}",
                f"--max-model-len={flags['--max-model-len']}",
            ],
            env=env,
            log_dir=log_dir,
        )
        core.wait_for_line("^READY")
        server.wait_for_port(port)
    except BaseException:
        server.close(seconds=0)
        if core:
            core.close(seconds=0)
        raise
    return Engine(process=server, port=port, core=core)


def start_mock_server(flags: Mapping[str, object], *, log_dir: Path, port: int = 0) -> Engine:
    """Start our mock server, on a port that the system chooses unless one is given."""
    argv = [sys.executable, "-m", "trio_sidecar", "engine", "mock", f"--listen=127.0.0.1:{port}"]
    argv += [f"{flag}={value}" for flag, value in ({"--log-level": "debug"} | dict(flags)).items()]
    server = Child("mock-server", argv, env=environment(), log_dir=log_dir)
    try:
        port = int(server.wait_for_line(r"127\.0\.0\.1:(\d+)")[1])
        server.wait_for_port(port)
    except BaseException:
        server.close(seconds=0)
        raise
    return Engine(process=server, port=port)


def ask_model(engine: Engine) -> wire.ModelInfo:
    """What the engine says about its model."""
    with grpc.insecure_channel(engine.endpoint) as channel:
        method = methods.GET_MODEL_INFO
        call = channel.unary_unary(method.path, request_serializer=bytes, response_deserializer=wire.ModelInfo.parse)
        info: wire.ModelInfo = call(wire.GetModelInfoRequest(), timeout=10)
    return info


def start_rust_sidecar(
    endpoint: str,
    *,
    discovery: Path,
    log_dir: Path,
    arguments: Sequence[str] = (),
    name: str = "rust-sidecar",
    **variables: str,
) -> Child:
    """Start the Rust sidecar that the Dynamo wheel ships, as :func:`start_worker` does."""
    argv = [sys.executable, "-c", RUST_SIDECAR, "--grpc-endpoint", endpoint, *arguments]
    return Child(name, argv, env=dynamo_environment(discovery, **variables), log_dir=log_dir)


def start_worker(
    endpoint: str,
    *,
    discovery: Path,
    log_dir: Path,
    arguments: Sequence[str] = (),
    name: str = "worker",
    **variables: str,
) -> Child:
    """Start the worker under test, with these variables besides; ready once a front end lists its model."""
    argv = [sys.executable, "-m", "trio_sidecar", "worker", "--grpc-endpoint", endpoint, *arguments]
    return Child(name, argv, env=dynamo_environment(discovery, **variables), log_dir=log_dir)


@attrs.frozen(slots=True)
class Frontend:
    """A running Dynamo front end."""

    process: Child
    url: str

    def models(self) -> list[str]:
        """The models that it would route to; none while it does not listen yet."""
        try:
            answer = httpx2.get(f"{self.url}/v1/models", timeout=5, trust_env=False)
        except httpx2.TransportError:
            return []
        return [entry["id"] for entry in answer.json()["data"]] if answer.status_code == httpx2.codes.OK else []


def start_frontend(*, discovery: Path, log_dir: Path) -> Frontend:
    """Start a Dynamo front end; ready once it listens."""
    port = free_port()
    argv: list[str | Path] = [sys.executable, HERE / "frontend_main.py", str(port)]
    child = Child("frontend", argv, env=dynamo_environment(discovery), log_dir=log_dir)
    try:
        child.wait_for_port(port)
    except BaseException:
        child.close(seconds=0)
        raise
    return Frontend(child, f"http://127.0.0.1:{port}")


def wait_for_model(frontend: Frontend, model: str, workers: Sequence[Child], *, seconds: float = 30) -> None:
    """Wait until the front end lists the model.

    Raises:
        ChildFailed: A worker or the front end ended, or the time ran out.
    """
    first = workers[0]

    def listed() -> bool:
        for child in (frontend.process, *workers[1:]):
            if not child.running:
                raise ChildFailed(child, "ended during start-up")
        return model in frontend.models()

    first.wait_until(listed, f"front end lists {model}", seconds=seconds)
