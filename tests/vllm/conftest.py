"""A real vLLM on the CPU, started once, with a tiny model made here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.plain_vllm_model import make_vllm_lora, make_vllm_model
from support.processes import free_port
from support.tiny_model import make_tokenizer
from support.vllm_server import vllm_server
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.vllm_server import VllmServer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and an adapter for it."""
    directory = tmp_path_factory.mktemp("models")
    make_vllm_model(directory / "model")
    make_vllm_lora(directory / "lora")
    return directory


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Our server, with LoRA and KV events; at its end it is asked to shut down, and does."""
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}", "topic": "kv"}
    arguments = ["--enable-lora", "--max-loras=2", f"--kv-events-config={json.dumps(events)}"]
    with vllm_server(models, make_tokenizer(), tmp_path_factory.mktemp("server"), arguments=arguments) as running:
        yield running
        running.call(methods.SHUTDOWN, wire.ShutdownRequest())
        assert 0 == running.process.wait(seconds=30)
