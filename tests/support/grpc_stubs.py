"""An independent client: google protobuf's classes, compiled from protos/ when first asked for, over grpcio."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    import grpc

PROTOS = Path(__file__).parents[2] / "protos"


class Stubs:
    """Message classes by their full name, and calls by their path."""

    def __init__(self, descriptors: bytes) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            self._pool.Add(file)

    def message(self, name: str) -> Any:
        """A message class, ``GenerateRequest`` or ``grpc.health.v1.HealthCheckRequest``."""
        full = name if "." in name else f"vllm.{name}"
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full))

    def call(self, channel: grpc.Channel, path: str) -> Any:
        """A callable for one method, ``vllm.Inference/Generate``."""
        service, _, name = path.rpartition("/")
        method = self._pool.FindServiceByName(service).methods_by_name[name]
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        response = message_factory.GetMessageClass(method.output_type)
        return make(
            f"/{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )


@functools.cache
def descriptors() -> bytes:
    """The contract, compiled by protoc, once per test run."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "contract.binpb"
        command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_imports"]
        sources = map(str, sorted(PROTOS.rglob("*.proto")))
        subprocess.run([*command, f"--descriptor_set_out={target}", *sources], check=True, timeout=60)
        return target.read_bytes()


@functools.cache
def stubs() -> Stubs:
    """Classes and calls of the contract."""
    return Stubs(descriptors())
