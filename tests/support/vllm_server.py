"""Our server over a real vLLM on the CPU, and an independent client for it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import grpc

from support.peers import environment
from support.processes import Child
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenizers import Tokenizer

    from trio_sidecar.wire.methods import Method

MODEL_NAME = "tiny"
START_SECONDS = 180
CALL_SECONDS = 60
VLLM_ARGUMENTS = (
    f"--served-model-name={MODEL_NAME}",
    "--distributed-executor-backend=uni",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--enforce-eager",
    "--max-model-len=256",
    "--max-num-seqs=4",
    "--dtype=float32",
)
VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU platform replaces the executor by one with more processes
    "HF_HUB_OFFLINE": "1",
}
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@attrs.frozen(slots=True, kw_only=True)
class VllmServer:
    """A running server.

    Attributes:
        process: The server.
        endpoint: Where it listens.
        tokenizer: That of its model.
        lora: Path of an adapter that it may load.
        channel: A client's connection.
    """

    process: Child
    endpoint: str
    tokenizer: Tokenizer
    lora: Path
    channel: grpc.Channel

    def call(self, method: Method[Any, Any], request: Any, **rest: Any) -> Any:
        """Make a unary call."""
        make = self.channel.unary_unary(
            method.path, request_serializer=bytes, response_deserializer=method.response.parse
        )
        return make(request, timeout=CALL_SECONDS, **rest)

    def stream(self, request: wire.GenerateRequest, **rest: Any) -> Any:
        """Begin a stream."""
        make = self.channel.unary_stream(
            methods.GENERATE_STREAM.path, request_serializer=bytes, response_deserializer=wire.GenerateResponse.parse
        )
        return make(request, timeout=CALL_SECONDS, **rest)

    def generate(self, **fields: Any) -> wire.GenerateResponse:
        """The unary answer to a request with a short prompt."""
        answer: wire.GenerateResponse = self.call(methods.GENERATE, request(**fields))
        return answer

    def health(self, service: str) -> wire.HealthCheckResponseServingStatus:
        """The status of one service."""
        answer: wire.HealthCheckResponse = self.call(methods.HEALTH_CHECK, wire.HealthCheckRequest(service=service))
        return answer.status

    def refusal(self, method: Method[Any, Any], request: Any, **rest: Any) -> grpc.StatusCode:
        """The status with which a call fails."""
        try:
            found = self.call(method, request, **rest)
        except grpc.RpcError as error:
            return error.code()
        msg = f"{method.name} was not refused: {found}"
        raise AssertionError(msg)


def engine_processes(process: Child) -> list[int]:
    """The process ids of vLLM's engine under a process."""
    found = []
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return [pid for pid in found if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def request(**fields: Any) -> wire.GenerateRequest:
    """A request for eight tokens, with their ids; the fields replace what they name."""
    plain: dict[str, Any] = {
        "text": "The harbour",
        "stopping": wire.StoppingCriteria(max_new_tokens=8, ignore_eos=True),
        "response": wire.ResponseOptions(output_token_ids=True),
    }
    return wire.GenerateRequest(**(plain | fields))


def vllm_environment(models: Path, **extra: str) -> dict[str, str]:
    """The environment of a process with a vLLM in it."""
    return environment(**VLLM_ENVIRONMENT, VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES=str(models), **extra)


@contextlib.contextmanager
def vllm_server(
    models: Path,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    arguments: Sequence[str] = (),
    name: str = "vllm-server",
    **variables: str,
) -> Iterator[VllmServer]:
    """Start a server over ``models/model``, with these variables besides; ready when it listens."""
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "trio_sidecar",
        "engine",
        "vllm",
        models / "model",
        "--listen=127.0.0.1:0",
    ]
    argv += [*VLLM_ARGUMENTS, *arguments]
    process = Child(name, argv, env=vllm_environment(models, **variables), log_dir=directory)
    try:
        endpoint = process.wait_for_line(r"^listening on (\S+)", seconds=START_SECONDS)[1]
        with grpc.insecure_channel(endpoint, options=NO_LIMIT) as channel:
            yield VllmServer(
                process=process, endpoint=endpoint, tokenizer=tokenizer, lora=models / "lora", channel=channel
            )
    finally:
        process.close(seconds=20)
