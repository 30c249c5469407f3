"""Google protobuf's own classes for the contract, made from protos/ in a private pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from trio_sidecar.wire._generated.message_pool import default_message_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

PROTOS = Path(__file__).parents[3] / "protos"


@attrs.frozen
class Contract:
    """The contract as google protobuf sees it."""

    files: Sequence[descriptor_pb2.FileDescriptorProto]
    pairs: Sequence[tuple[type[Any], type[Any]]]
    """Each of our classes with its google counterpart, in a fixed order."""

    def google(self, ours: type[Any]) -> type[Any]:
        """The google class for one of ours."""
        return dict(self.pairs)[ours]


@pytest.fixture(scope="session")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Contract:
    """The contract, compiled by protoc."""
    target = tmp_path_factory.mktemp("descriptors") / "contract.binpb"
    sources = sorted(PROTOS.rglob("*.proto"))
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={target}", *map(str, sources)], check=True, timeout=60)
    files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    pairs = []
    for url, ours in sorted(default_message_pool.url_to_type.items()):
        descriptor = pool.FindMessageTypeByName(url.rpartition("/")[2])
        pairs.append((ours, message_factory.GetMessageClass(descriptor)))
    return Contract(list(files), pairs)
