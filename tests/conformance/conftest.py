"""Four pairs of real peers: {our worker, Rust sidecar} x {our mock server, vllm-rs}; each is started once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.backends import Backend, EngineKind, mock_backend, vllm_backend
from support.stack import PAIRS, Stack, pair_name, stack

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS_PER_SECOND = 100


@pytest.fixture(scope="session")
def mock_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Our mock server."""
    with mock_backend(tmp_path_factory.mktemp("mock"), tokens_per_second=TOKENS_PER_SECOND) as backend:
        yield backend


@pytest.fixture(scope="session")
def vllm_rs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """The real vllm-rs server."""
    with vllm_backend(tmp_path_factory.mktemp("vllm"), tokens_per_second=TOKENS_PER_SECOND) as backend:
        yield backend


@pytest.fixture(scope="session", params=PAIRS, ids=pair_name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker before one engine, with a front end."""
    worker, engine = request.param
    backend: Backend = request.getfixturevalue("mock_server" if engine is EngineKind.MOCK else "vllm_rs")
    with stack(backend, worker, tmp_path_factory.mktemp(worker.value)) as running:
        yield running
