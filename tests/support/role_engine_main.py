"""A mock engine in one role that writes down what it is asked: ``python role_engine_main.py ROLE DIRECTORY``.

It appends one line of JSON to ``events.jsonl`` in the directory for each request as it comes and as it is released, and
the test steers it with files there: while ``hold-opening`` exists no request is accepted, while ``hold-answers`` exists
none is answered, and while ``refuse`` exists each is refused with the gRPC status that the file names.

A prefill engine's handoff gets members on top that no worker knows, and a port as a number.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trio_sidecar.bridge import Host, aio_sleep, run
from trio_sidecar.cli.commands import print_address
from trio_sidecar.config import DisaggregationMode, LogSettings, MockSettings, ServerSettings
from trio_sidecar.convert.struct import json_from_struct, struct_from_json
from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.observe.logging import configure_logging
from trio_sidecar.server import run_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from trio_sidecar.engines.contract import EngineStream
    from trio_sidecar.wire import GenerateRequest, GenerateResponse

MODEL = "mock"
PORT = 20097
OPAQUE: dict[str, Any] = {
    "remote_port": PORT,
    "tp_size": 1,
    "ratio": 0.5,
    "large": 2**52 + 1,
    "nothing": None,
    "flags": [True, None, {"ids": [1, 2], "empty": {}}],
    "note": "kürzer als \u0000 and \U0001f600",
}
POLL_SECONDS = 0.005


class RoleStream:
    """Answers that wait while they are to be held."""

    def __init__(self, stream: EngineStream, engine: RoleEngine) -> None:
        self._stream = stream
        self._engine = engine
        self.tokens = 0

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Answers of the mock, amended."""
        await self._engine.aio_wait_while("hold-answers")
        answers = await self._stream.aio_receive()
        for answer in answers:
            if answer.outputs is None:
                continue
            self.tokens += len(answer.outputs.token_ids)
            finish = answer.outputs.finish_info
            if finish is not None and finish.kv_transfer_params is not None:
                handoff = json_from_struct(finish.kv_transfer_params, label="handoff") | OPAQUE
                finish.kv_transfer_params = struct_from_json(handoff, label="handoff")
                self._engine.write("handed_over", handoff=handoff)
        return answers


class RoleEngine:
    """The mock engine under the eyes of a test."""

    def __init__(self, engine: MockEngine, directory: Path) -> None:
        self._engine = engine
        self._directory = directory
        self.aio_call = engine.aio_call
        self.aio_check_health = engine.aio_check_health

    @asynccontextmanager
    async def aio_generate(self, request: GenerateRequest, metadata: Mapping[str, str]) -> AsyncIterator[RoleStream]:
        """Write it down, then ask the mock."""
        kv = request.kv.kv_transfer_params if request.kv is not None else None
        self.write(
            "received",
            request_id=request.request_id,
            token_ids=list(request.token_ids.ids) if request.token_ids is not None else None,
            stopping=[request.stopping.max_new_tokens, request.stopping.min_new_tokens] if request.stopping else None,
            kv=None if kv is None else json_from_struct(kv, label="kv"),
            metadata={name: value for name, value in metadata.items() if name.startswith("x-")},
        )
        tokens = 0
        try:
            refusal = self._directory / "refuse"
            if refusal.exists():
                raise RpcError(StatusCode[refusal.read_text()], "the test wants it so")
            await self.aio_wait_while("hold-opening")
            async with self._engine.aio_generate(request, metadata) as stream:
                own = RoleStream(stream, self)
                try:
                    yield own
                finally:
                    tokens = own.tokens
        finally:
            self.write("released", request_id=request.request_id, tokens=tokens)

    async def aio_wait_while(self, name: str) -> None:
        """Wait while that file exists."""
        while (self._directory / name).exists():
            await aio_sleep(POLL_SECONDS)

    def write(self, event: str, **fields: object) -> None:
        """One line in the file."""
        with (self._directory / "events.jsonl").open("a") as sink:
            sink.write(json.dumps({"event": event, "at": time.time(), **fields}) + "\n")


@asynccontextmanager
async def open_engine(role: str, directory: Path) -> AsyncIterator[RoleEngine]:
    """Open the engine."""
    settings = MockSettings(
        served_model_name=MODEL, disaggregation_mode=DisaggregationMode(role), ttft_ms=10, itl_ms=10, max_model_len=2048
    )
    async with open_mock(settings) as engine:
        yield RoleEngine(engine, directory)


if __name__ == "__main__":
    configure_logging(LogSettings())
    where = Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    server = ServerSettings(listen=ListenAddress(host="127.0.0.1", port=0), drain_secs=0)
    run(run_server, open_engine(sys.argv[1], where), server, print_address, host=Host.UVLOOP)
