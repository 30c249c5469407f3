"""A trace goes through our server into a real vLLM, which makes spans of its own."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from support.tiny_model import make_tokenizer
from support.traces import PARENT, SPAN_ID, TRACE_ID, running_collector
from support.vllm_server import request, vllm_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


def test_vllms_own_span_is_a_part_of_ours(models: Path, tmp_path: Path) -> None:
    """Ours is a part of the client's; a malformed context begins a trace, and both are answered."""
    with running_collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        arguments = [f"--otlp-traces-endpoint={collector.url}/v1/traces"]
        with vllm_server(models, make_tokenizer(), tmp_path, arguments=arguments, **variables) as server:
            for parent in (PARENT, "garbage"):
                *_, last = server.stream(request(), metadata=[("traceparent", parent)])
                assert 8 == last.outputs.finish_info.num_output_tokens
            server.process.send(signal.SIGTERM)
            assert 0 == server.process.wait(seconds=30)
    ours = [span for span in collector.named("request", "trio-sidecar-engine") if span.trace_id == TRACE_ID]
    assert [SPAN_ID] == [span.parent for span in ours]
    theirs = [span for span in collector.seen if span.name == "llm_request"]
    assert 2 == len(theirs)
    assert {(TRACE_ID, ours[0].span_id)} == {
        (span.trace_id, span.parent) for span in theirs if span.trace_id == TRACE_ID
    }
