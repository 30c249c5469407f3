"""A real vLLM's own metrics stand beside ours."""

from __future__ import annotations

import signal
import urllib.request
from typing import TYPE_CHECKING

import pytest

from support.exposition import values
from support.processes import free_port
from support.tiny_model import make_tokenizer
from support.vllm_server import request, vllm_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


def page(port: int, path: str) -> str:
    """What a scrape gets."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def test_a_servers_page(models: Path, tmp_path: Path) -> None:
    """Both count the same tokens, and health is that of the engine."""
    port = free_port()
    with vllm_server(models, make_tokenizer(), tmp_path, arguments=[f"--metrics-port={port}"]) as server:
        *_, last = server.stream(request())
        assert 8 == last.outputs.finish_info.num_output_tokens
        text = page(port, "/metrics")
        assert "serving\n" == page(port, "/health")
        server.process.send(signal.SIGTERM)
        assert 0 == server.process.wait(seconds=30)
    assert 8 == values(text)["server_output_tokens_total"]
    theirs = values(text, "vllm:")
    (generated,) = [value for name, value in theirs.items() if name.startswith("generation_tokens_total{")]
    assert 8 == generated
    assert {} == values(text, "python_")
