"""Two servers side by side, in two configurations; each is started once, when a test first needs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import pytest

from support import vllm_model, vllm_servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tokenizers import Tokenizer

    from support.parity import Pair
    from support.vllm_servers import Running

TEST_SECONDS = 300
"""A ceiling that holds the start of the servers, which counts as part of the first test that needs them."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests that end the servers say so."""
    config.addinivalue_line("markers", "ends_servers: runs after all the others, because it ends the servers")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the ceiling, and run those that end the servers last."""
    for item in items:
        if "/parity/" in item.path.as_posix():
            item.add_marker(pytest.mark.parity)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS))
    items.sort(key=lambda item: item.get_closest_marker("ends_servers") is not None)


@attrs.frozen(slots=True, kw_only=True)
class Model:
    """A model directory with adapters beside it.

    Attributes:
        root: Where clients may name adapters.
    """

    root: Path
    tokenizer: Tokenizer

    @property
    def path(self) -> Path:
        """The model."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """An adapter."""
        return self.root / "adapter"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model of both servers."""
    root = tmp_path_factory.mktemp("model")
    tokenizer = vllm_model.make_vllm_model(root / "model", context_length=2 * vllm_servers.CONTEXT_LENGTH)
    vllm_model.make_adapter(root / "adapter")
    return Model(root=root, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def running(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Processes with adapters, KV events and the model's own sampling defaults."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0", "topic": "kv"}
    options = vllm_servers.Options(
        model=model.path,
        arguments=["--max-num-seqs=4", "--enable-lora", "--max-loras=2", "--kv-events-config", json.dumps(events)],
        variables={"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(model.root)},
    )
    with vllm_servers.both_running(options, log_dir=tmp_path_factory.mktemp("servers")) as both:
        yield both


@pytest.fixture(scope="session")
def both(running: tuple[Running, Running]) -> Iterator[Pair]:
    """A client of each of them."""
    with vllm_servers.connect(*running) as pair:
        yield pair


@pytest.fixture(scope="session")
def plain_running(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Processes without any of that, one request at a time, and without a limit for logprobs."""
    options = vllm_servers.Options(
        model=model.path,
        arguments=["--max-num-seqs=1", "--generation-config=vllm", "--max-logprobs=-1"],
        names=[vllm_servers.MODEL],
    )
    with vllm_servers.both_running(options, log_dir=tmp_path_factory.mktemp("plain-servers")) as both:
        yield both


@pytest.fixture(scope="session")
def plain(plain_running: tuple[Running, Running]) -> Iterator[Pair]:
    """A client of each of them."""
    with vllm_servers.connect(*plain_running) as pair:
        yield pair
