"""Requests that do not run to their end, on both servers: the client goes, the deadline comes, Abort is called."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support.deviations import deviation
from support.parity import as_dict, read, refusal, request
from support.vllm_servers import read_gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.parity import Pair, Server

HELLO = "Hello"
LONG = {"max_new_tokens": 1000, "ignore_eos": True}
MEDIUM = {"max_new_tokens": 150, "ignore_eos": True}
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
FREE_SECONDS = 1.0
"""How soon the engine must have forgotten a request that nobody waits for."""
POLL_SECONDS = 0.01


def until(condition: Callable[[], bool], what: str, *, seconds: float = 20.0) -> None:
    """Wait for a condition."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(POLL_SECONDS)


def wait_for(server: Server, gauge: str, value: float, *, seconds: float = 20.0) -> None:
    """Wait until the engine reports a number."""
    until(lambda: read_gauge(server.metrics_port, gauge) == value, f"{server.name}: {gauge} {value}", seconds=seconds)


def begin(
    server: Server, *, messages: int, stopping: dict[str, Any] | None = None, **fields: Any
) -> tuple[Any, list[Any]]:
    """Start a long answer, and read so many messages of it; the request is with the engine in any case."""
    stream = server.open(request(HELLO, stopping=stopping or LONG, response={"output_token_ids": True}, **fields))
    stream.initial_metadata()
    return stream, [next(stream) for _ in range(messages)]


class Resumed:
    """A stream of which some messages were read."""

    def __init__(self, messages: list[Any], stream: Any) -> None:
        self._parts = (messages, stream)

    def __iter__(self) -> Any:
        """All messages, those that were read first."""
        for part in self._parts:
            yield from part


@pytest.mark.parametrize("messages", [0, 1, 5])
def test_a_client_that_goes_away(both: Pair, messages: int) -> None:
    """The engine drops its request at once, whether or not anything was sent."""
    for server in both:
        stream, _ = begin(server, messages=messages)
        wait_for(server, RUNNING, 1)
        stream.cancel()
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)


def test_a_client_that_waits_for_all_and_goes_away(both: Pair) -> None:
    """The same without a stream."""
    for server in both:
        call = server.call("vllm.Inference/Generate").future(request(HELLO, stopping=LONG), timeout=30)
        wait_for(server, RUNNING, 1)
        call.cancel()
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)


def test_a_connection_that_closes(both: Pair, running: Any) -> None:
    """All requests of a connection go with it."""
    for server, process in zip(both, running, strict=True):
        with grpc.insecure_channel(process.endpoint) as channel:
            others = [begin(type(server)(name=server.name, channel=channel), messages=2) for _ in range(2)]
            wait_for(server, RUNNING, len(others))
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "at-once"])
def test_deadline(both: Pair, streamed: bool) -> None:
    """The caller's deadline ends the request in the engine too."""
    message = request(HELLO, stopping=LONG)
    for server in both:
        call = server.call("vllm.Inference/GenerateStream" if streamed else "vllm.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(message, timeout=0.2)) if streamed else call(message, timeout=0.2)
        code = refusal(caught.value).code
        if code == "CANCELLED" and server is both.theirs:
            deviation("deadline-status")
        else:
            assert "DEADLINE_EXCEEDED" == code
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)


def test_a_queued_request(plain: Pair) -> None:
    """One that waits for its turn is accepted, so its headers come, and it leaves the queue with its caller."""
    for server in plain:
        first, _ = begin(server, messages=2)
        queued, _ = begin(server, messages=0)
        wait_for(server, WAITING, 1)
        queued.cancel()
        wait_for(server, WAITING, 0, seconds=FREE_SECONDS)
        assert 1 == read_gauge(server.metrics_port, RUNNING)
        first.cancel()
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)


@pytest.mark.parametrize("ids", [[], ["unknown"], ["unknown", "unknown", ""]], ids=["none", "unknown", "repeated"])
def test_abort_of_nothing(both: Pair, ids: list[str]) -> None:
    """It is no error, and leaves the others alone."""
    streams = [begin(server, messages=2, request_id="left-alone", stopping=MEDIUM) for server in both]
    assert ("OK", {}) == both.control("Abort", request_ids=ids)
    for stream, messages in streams:
        finish = read(Resumed(messages, stream)).finish
        assert ("LENGTH", MEDIUM["max_new_tokens"]) == (finish["finish_reason"], finish["num_output_tokens"])


@pytest.mark.parametrize("messages", [0, 1, 4])
def test_abort(both: Pair, messages: int) -> None:
    """The stream ends well, with ABORTED, a sum that fits, and no stop reason."""
    for server in both:
        stream, found = begin(server, messages=messages, request_id="victim")
        assert ("OK", {}) == server.control("Abort", request_ids=["victim", "victim"])
        answer = read(Resumed(found, stream))
        assert ("OK", ("ABORTED", "", None), 0) == (answer.code, answer.end, answer.sizes[-1])
        assert answer.said["num_tokens"] == answer.finish["num_output_tokens"] < LONG["max_new_tokens"]
        assert answer.prompt is not None
        wait_for(server, RUNNING, 0, seconds=FREE_SECONDS)
        assert ("OK", {}) == server.control("Abort", request_ids=["victim"])


def test_abort_ends_all_of_that_id(both: Pair) -> None:
    """Ids need not be unique; whoever used it is hit, nobody else."""
    for server in both:
        victims = [begin(server, messages=1, request_id="same") for _ in range(2)]
        other, found = begin(server, messages=1, request_id="other", stopping=MEDIUM)
        server.control("Abort", request_ids=["same"])
        assert [("ABORTED", "", None)] * 2 == [read(Resumed(had, stream)).end for stream, had in victims]
        assert ("LENGTH", "", None) == read(Resumed(found, other)).end


def test_abort_of_a_queued_request(plain: Pair) -> None:
    """It gets the prompt's message and the end, without a token."""
    for server in plain:
        first, _ = begin(server, messages=2)
        queued, _ = begin(server, messages=0, request_id="queued")
        wait_for(server, WAITING, 1)
        server.control("Abort", request_ids=["queued"])
        answer = read(queued)
        assert (("ABORTED", "", None), (0,)) == (answer.end, answer.sizes)
        first.cancel()
        wait_for(server, RUNNING, 0)


def test_abort_of_a_request_at_once(both: Pair) -> None:
    """Who waits for the whole answer gets what there was."""
    for server in both:
        message = request(HELLO, request_id="at-once", stopping=LONG)
        call = server.call("vllm.Inference/Generate").future(message, timeout=30)
        wait_for(server, RUNNING, 1)
        server.control("Abort", request_ids=["at-once"])
        response = as_dict(call.result())
        finish = response["outputs"]["finish_info"]
        assert "ABORTED" == finish["finish_reason"]
        assert finish["num_output_tokens"] == response["outputs"]["num_tokens"]
        assert 4 == response["prompt_info"]["num_prompt_tokens"]
