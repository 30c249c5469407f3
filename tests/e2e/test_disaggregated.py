"""Prefill and decode workers behind Dynamo's real prefill router, over two mock engines."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from support import role_engine_main
from support.disaggregated import MODEL, PROMPT, Pair, going_away, open_pair
from support.mock_engine import answers_to, mock_settings, request_of, text_of
from support.openai import open_client
from support.stack import WorkerKind, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

RELEASE_SECONDS = 1.0
QUIET_SECONDS = 0.3
"""Enough for whatever would go wrong to have happened."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode worker of ours."""
    with open_pair(tmp_path_factory.mktemp("pair")) as running:
        running.start_worker("prefill")
        running.start_worker("decode")
        yield running


def expected_text(count: int) -> str:
    """What one engine that does both says."""
    return text_of(answers_to(request_of(PROMPT, stopping={"max_new_tokens": count}), mock_settings()))


@pytest.mark.rule("8.8", "R7.31", "R7.33", "R7.34", "R16.17", "FR-074", "FR-075")
async def test_round_trip(pair: Pair) -> None:
    """One engine prefills and the other answers; it gets the handoff as it was, but with the port as text."""
    await check_round_trip(pair)


@pytest.mark.rule("R7.34", "R16.17")
@pytest.mark.parametrize("rust", ["prefill", "decode"])
async def test_round_trip_with_the_rust_sidecar(tmp_path: Path, rust: str) -> None:
    """Either of the two workers may be the Rust sidecar, and nothing about the handoff changes."""
    with open_pair(tmp_path) as pair:
        for role in ("prefill", "decode"):
            pair.start_worker(role, WorkerKind.RUST if role == rust else WorkerKind.OURS)
        await check_round_trip(pair)


async def check_round_trip(pair: Pair) -> None:
    """Ask, and look at what client and engines got."""
    async with pair.client() as client:
        answer = await client.complete(max_tokens=6)
        streamed = await client.stream_complete(max_tokens=6, stream_options={"include_usage": True})
    assert expected_text(6) == answer.text == streamed.text
    assert ("length", ["length"]) == (answer.finish_reason, streamed.finish_reasons)
    assert (len(PROMPT), 6, len(PROMPT) + 6) == answer.usage
    assert [answer.usage] == streamed.usages
    prefilled, decoded = pair.prefill.received[-1], pair.decode.received[-1]
    handoff = pair.prefill.events("handed_over")[-1]["handoff"]
    assert prefilled["request_id"] == decoded["request_id"] == handoff["mocker_request_id"]
    assert PROMPT == prefilled["token_ids"] == decoded["token_ids"]
    assert ([1, 1], 6) == (prefilled["stopping"], decoded["stopping"][0])
    assert {"do_remote_decode": True} == {key: value for key, value in prefilled["kv"].items() if value is not None}
    assert handoff | {"remote_port": str(role_engine_main.PORT)} == decoded["kv"]
    assert handoff.items() >= role_engine_main.OPAQUE.items()


@pytest.mark.rule("8.8", "FR-075")
@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"])
async def test_failed_prefill(pair: Pair, status: str) -> None:
    """A prefill that fails fails the request, no decode engine hears of it, and the next request is answered."""
    async with pair.client() as client:
        before = len(pair.decode.received)
        with pair.prefill.told("refuse", status):
            refused = await client.complete(max_tokens=3)
            assert refused.status >= 400
        assert before == len(pair.decode.received)
        await answered(pair, client)


@pytest.mark.rule("R10.16")
async def test_failed_decode(pair: Pair) -> None:
    """A decode engine that refuses fails the request with its status, and the next request is answered."""
    async with pair.client() as client:
        with pair.decode.told("refuse", "INVALID_ARGUMENT"):
            refused = await client.complete(max_tokens=3)
        assert (400, True) == (refused.status, "the test wants it so" in refused.error)
        await answered(pair, client)


@pytest.mark.rule("10.1", "8.8", "R7.37", "R7.38", "FR-004", "FR-005")
@pytest.mark.parametrize("hold", ["hold-opening", "hold-answers"])
async def test_cancel_during_prefill(pair: Pair, hold: str) -> None:
    """A prefill request, sent to a rank, is let go of at once when it is cancelled, and the next one is answered."""
    async with pair.client() as client:
        with pair.prefill.told(hold):
            known = len(pair.prefill.received)
            routing = {"dp_rank": 5, "prefill_dp_rank": 0}  # the mock has rank 0 only
            async with pair.asking("dynamo.prefill.generate", routing=routing) as stop:
                await eventually(lambda: len(pair.prefill.received) > known, "the prefill engine has the request")
                stopped = time.time()
                chunks = await stop()
            await eventually(lambda: pair.prefill.idle, "the prefill engine is let go of")
            assert {"x-data-parallel-rank": "0"} == pair.prefill.received[-1]["metadata"]
            assert pair.prefill.events("released")[-1]["at"] - stopped < RELEASE_SECONDS
        assert all("disaggregated_params" not in chunk for chunk in chunks)
        await answered(pair, client)


@pytest.mark.rule("R10.5", "FR-003", "FR-004")
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_client_leaves_during_prefill(pair: Pair, stream: bool) -> None:
    """Dynamo's front end lets the prefill end; then the decode engine fetches the blocks and is let go of."""
    async with pair.client() as client:
        decoded, prefilled = len(pair.decode.received), len(pair.prefill.received)
        with pair.prefill.told("hold-answers"):
            async with going_away(client, stream=stream):
                await eventually(lambda: len(pair.prefill.received) > prefilled, "the prefill engine has the request")
            await trio.sleep(QUIET_SECONDS)
        await eventually(lambda: len(pair.decode.received) > decoded, "the decode engine has the request")
        await pair.settle()
        assert 1 <= pair.decode.events("released")[-1]["tokens"] < 100
        await trio.sleep(QUIET_SECONDS)
        assert decoded + 1 == len(pair.decode.received)
        await answered(pair, client)


@pytest.mark.rule("R10.5", "R10.6", "R10.13", "FR-002", "FR-003")
@pytest.mark.parametrize("hold", ["hold-opening", "hold-answers"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_client_leaves_before_the_first_token(pair: Pair, hold: str, stream: bool) -> None:
    """The decode engine keeps the request until its first token, so that it fetches the blocks, and no longer."""
    async with pair.client() as client:
        with pair.decode.told(hold):
            known = len(pair.decode.received)
            async with going_away(client, stream=stream):
                await eventually(lambda: len(pair.decode.received) > known, "the decode engine has the request")
            await trio.sleep(QUIET_SECONDS)
            assert known + 1 == len(pair.decode.received)
            assert not pair.decode.idle
        held_until = time.time()
        await pair.settle()
        released = pair.decode.events("released")[-1]
        assert released["at"] - held_until < RELEASE_SECONDS
        assert 1 <= released["tokens"] < 100
        await answered(pair, client)


@pytest.mark.rule("FR-008")
@pytest.mark.parametrize("refused", [{"top_k": 0}, {"min_p": 0.0}], ids=["top_k", "min_p"])
async def test_a_decode_that_is_refused_fetches_the_blocks(pair: Pair, refused: dict[str, float]) -> None:
    """The client is told what is wrong; the decode engine gets the handoff with the bare prompt, for one token."""
    async with pair.client() as client:
        answer = await client.complete(max_tokens=6, **refused)
        assert 400 == answer.status
        handoff = pair.prefill.events("handed_over")[-1]["handoff"]
        await eventually(lambda: bool(pair.decode.received), "the decode engine has the request")
        await eventually(lambda: handoff["mocker_request_id"] == pair.decode.received[-1]["request_id"], "it is that")
        decoded = pair.decode.received[-1]
        assert (PROMPT, 1) == (decoded["token_ids"], decoded["stopping"][0])
        assert handoff | {"remote_port": str(role_engine_main.PORT)} == decoded["kv"]
        await pair.settle()
        await answered(pair, client)


@pytest.mark.rule("R10.5", "FR-003")
async def test_client_leaves_between_prefill_and_decode(pair: Pair) -> None:
    """A request that was cancelled before the decode worker took it up leaves nothing open; the next is answered."""
    async with pair.client() as client:
        worker = pair.workers["decode"]
        known = len(pair.prefill.events("handed_over"))
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            async with going_away(client):
                await eventually(lambda: len(pair.prefill.events("handed_over")) > known, "prefill has ended")
                await trio.sleep(QUIET_SECONDS)  # for the router
            await trio.sleep(QUIET_SECONDS)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        await trio.sleep(QUIET_SECONDS)
        await pair.settle()
        await answered(pair, client)


@pytest.mark.rule("R10.11", "FR-001")
async def test_client_leaves_during_decode(pair: Pair) -> None:
    """After the first token the decode engine is let go of at once."""
    async with pair.client() as client:
        await client.leave_after("/v1/completions", {"max_tokens": 900, "ignore_eos": True}, events=3)
        left = time.time()
        await pair.settle()
        released = pair.decode.events("released")[-1]
        assert released["at"] - left < RELEASE_SECONDS
        assert 3 <= released["tokens"] < 200
        await answered(pair, client)


@pytest.mark.rule("R11.7", "R11.13", "R11.14")
async def test_prefill_worker_is_ended(tmp_path: Path) -> None:
    """A decode worker alone is not enough; a prefill worker that is ended is withdrawn first, and cuts no request."""
    with open_pair(tmp_path) as pair:
        pair.start_worker("decode").wait_until(lambda: pair.registered("backend"), "registered", seconds=30)
        async with open_client(pair.frontend.url, MODEL, PROMPT) as early:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
            assert 400 <= (await early.http.post(f"{early.url}/v1/completions", json=body)).status_code
        worker = pair.start_worker("prefill")
        async with pair.client() as client, trio.open_nursery() as nursery:
            known, answers = len(pair.prefill.received), []

            async def ask() -> None:
                answers.append(await client.complete(max_tokens=3))

            with pair.prefill.told("hold-answers"):
                nursery.start_soon(ask)
                await eventually(lambda: len(pair.prefill.received) > known, "the prefill engine has the request")
                worker.send(signal.SIGTERM)
                await eventually(lambda: not pair.registered("prefill"), "the worker is withdrawn", seconds=2)
                assert worker.running
                await eventually(lambda: "worker_draining" in worker.log, "Dynamo has waited for the decode peers")
                assert not pair.prefill.idle
            await eventually(lambda: not worker.running, "the worker has ended", seconds=5)
        assert 0 == worker.wait(seconds=0)
        assert [expected_text(3)] == [answer.text for answer in answers]
        assert "Traceback" not in worker.log


async def answered(pair: Pair, client: Any) -> None:
    """A request goes through both engines and leaves nothing."""
    with trio.fail_after(10):
        while (answer := await client.complete(max_tokens=3)).status != 200:  # noqa: ASYNC110 - shunned for seconds
            await trio.sleep(0.2)
    assert expected_text(3) == answer.text
    await pair.settle()
    assert pair.prefill.received[-1]["request_id"] == pair.decode.received[-1]["request_id"]
