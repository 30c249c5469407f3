"""The end of both servers: asked for, and by the death of the engine. Runs last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support.deviations import deviation
from support.parity import refusal, request

if TYPE_CHECKING:
    from support.parity import Pair
    from support.vllm_servers import Running

pytestmark = [pytest.mark.ends_servers]

LONG = {"max_new_tokens": 200, "ignore_eos": True}
END_SECONDS = 90
"""Interpreters with torch in them take seconds to end, many on a busy machine."""


def news(watch: Any) -> int | str:
    """What a health watch says next, or how it ends."""
    try:
        return int(next(watch).status)
    except grpc.RpcError as error:
        return refusal(error).code


def test_the_engine_dies(plain: Pair, plain_running: tuple[Running, Running]) -> None:
    """Streams fail at once, a watch hears of it, and the process ends with a failure."""
    ends: dict[str, tuple[str, int | str]] = {}
    for server, running in zip(plain, plain_running, strict=True):
        watch = server.watch("vllm.Inference")
        assert 1 == news(watch)
        stream: Any = server.open(request("Hello", stopping=LONG))
        for _ in range(3):
            next(stream)
        running.kill_engine()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        ends[server.name] = (refusal(caught.value).code, news(watch))
        assert 0 != running.process.wait(seconds=END_SECONDS)
    deviation("engine-death-status")
    assert ("INTERNAL", 2) == ends["ours"]
    stream_end, health = ends["vllm-rs"]
    assert stream_end in {"INTERNAL", "UNAVAILABLE"}
    assert health in {2, "UNAVAILABLE", "OK"}


def test_shutdown(both: Pair, running: tuple[Running, Running]) -> None:
    """The call is answered, the server ends in good order."""
    for server, process in zip(both, running, strict=True):
        assert server.control("Shutdown")[0] in {"OK", "UNAVAILABLE"}
        assert 0 == process.process.wait(seconds=END_SECONDS)
