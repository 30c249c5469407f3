"""Google protobuf's own classes for the contract, made from protos/ in a private pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from support.grpc_stubs import descriptors
from trio_sidecar.wire._generated.message_pool import default_message_pool

if TYPE_CHECKING:
    from collections.abc import Sequence


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
def contract() -> Contract:
    """The contract, compiled by protoc."""
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    pairs = []
    for url, ours in sorted(default_message_pool.url_to_type.items()):
        descriptor = pool.FindMessageTypeByName(url.rpartition("/")[2])
        pairs.append((ours, message_factory.GetMessageClass(descriptor)))
    return Contract(list(files), pairs)
