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
END_SECONDS = 30


def test_the_engine_dies(plain: Pair, plain_running: tuple[Running, Running]) -> None:
    """Streams fail at once, a watch hears of it, and the process ends with a failure."""
    codes = {}
    for server, running in zip(plain, plain_running, strict=True):
        watch = server.watch("vllm.Inference")
        assert 1 == next(watch).status
        stream: Any = server.open(request("Hello", stopping=LONG))
        for _ in range(3):
            next(stream)
        running.kill_engine()
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        codes[server.name] = refusal(caught.value).code
        assert 2 == next(watch).status
        assert 0 != running.process.wait(seconds=END_SECONDS)
    deviation("engine-death-status")
    assert "INTERNAL" == codes["ours"]
    assert codes["vllm-rs"] in {"INTERNAL", "UNAVAILABLE"}


def test_shutdown(both: Pair, running: tuple[Running, Running]) -> None:
    """The call is answered, the server ends in good order."""
    for server, process in zip(both, running, strict=True):
        assert server.control("Shutdown")[0] in {"OK", "UNAVAILABLE"}
        assert 0 == process.process.wait(seconds=END_SECONDS)
