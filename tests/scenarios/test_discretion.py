"""What clients ask and engines answer is in no log and in no error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trio

from support.conversion import convert
from support.mock_engine import mock_settings
from support.samples import minimal_request, rich_request
from trio_sidecar import wire
from trio_sidecar.bridge import run_aio
from trio_sidecar.convert.response import ResponseConverter, merge_chunks
from trio_sidecar.engines.mock import open_mock
from trio_sidecar.errors import ProtocolError, RpcError, SidecarError, StatusCode
from trio_sidecar.requests.limits import SilenceLimits
from trio_sidecar.requests.sessions import Sessions
from trio_sidecar.testing.fake_engine import Fail, FakeEngine, Gate, Script, Send, finish, tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

PROMPT, ANSWER, TEXT = 918273, 918274, "the-secret-word"


def wrong_count() -> wire.GenerateResponse:
    """An answer that contradicts itself."""
    response = tokens(ANSWER, text=TEXT)
    assert response.outputs is not None
    response.outputs.num_tokens = 5
    return response


SCRIPTS = {
    "whole": Script(stream=[Send(tokens(ANSWER, text=TEXT)), Send(finish(ANSWER, total=2, text=TEXT))]),
    "lies": Script(stream=[Send(tokens(ANSWER, text=TEXT)), Send(wrong_count())]),
    "dies": Script(stream=[Send(tokens(ANSWER, text=TEXT)), Fail(RpcError(StatusCode.UNAVAILABLE, "lost"))]),
    "crashes": Script(stream=[Send(tokens(ANSWER, text=TEXT)), Fail(ProtocolError("crash"))]),
    "ends": Script(stream=[Send(tokens(ANSWER, text=TEXT))]),
    "hangs": Script(stream=[Send(tokens(ANSWER, text=TEXT)), Gate()]),
}


def request(**changes: Any) -> dict[str, Any]:
    """A request that holds secrets wherever it can."""
    return minimal_request(token_ids=[PROMPT, PROMPT, PROMPT], stop={"stop": [TEXT], "max_tokens": 5}, **changes)


def check_discreet(logs: list[Any], error: object) -> None:
    """Nothing of it shows."""
    shown = repr(logs) + str(error)
    for secret in (PROMPT, ANSWER, TEXT):
        assert str(secret) not in shown


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_request_leaves_no_trace_of_its_content(
    aio_loop: object, autojump_clock: object, script: Script, cancelled: bool
) -> None:
    """At the most talkative level, however the request ends."""
    sessions = Sessions(
        responder=ResponseConverter, merge=merge_chunks, silence=SilenceLimits(first_response_secs=5, idle_secs=5)
    )

    def converted(body: Mapping[str, object], _: str) -> Any:
        return convert(dict(body))

    error: SidecarError | None = None
    with structlog.testing.capture_logs() as logs:
        async with sessions.serving(FakeEngine(script), converted):
            session = sessions.open(request(), "r")
            try:
                chunk = await run_aio(session.aio_next)
                assert chunk is not None
                assert ANSWER in chunk["token_ids"]
                if cancelled:
                    session.cancel()
                while await run_aio(session.aio_next) is not None:
                    pass
            except SidecarError as caught:
                error = caught
            await trio.testing.wait_all_tasks_blocked()
    assert "request_ended" in {entry["event"] for entry in logs}
    check_discreet(logs, error)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_options": {"n": 2}},
        {"routing": {"priority": "high"}},
        {"bootstrap_info": {}},
        {"token_ids": [PROMPT, "x"]},
        {"extra_args": {"unknown": TEXT}},
    ],
)
def test_a_refusal_names_the_field_and_not_the_prompt(changes: dict[str, Any]) -> None:
    """What is wrong is told, what is private is not."""
    with pytest.raises(SidecarError) as caught:
        convert({**request(), **changes})
    check_discreet([], caught.value)


async def test_the_mock_engine_is_as_discreet(aio_loop: object) -> None:
    """Its own log of requests holds numbers of tokens, not tokens."""
    body = convert({**rich_request(), "token_ids": [1234, 1235]}).wire
    body.model = ""
    body.lora_name = ""
    with structlog.testing.capture_logs() as logs:
        async with open_mock(mock_settings()) as engine:

            async def ask() -> list[int]:
                plain = wire.GenerateRequest(token_ids=body.token_ids, stopping=wire.StoppingCriteria(max_new_tokens=3))
                ids: list[int] = []
                async with engine.aio_generate(plain, {}) as stream:
                    while answers := await stream.aio_receive():
                        ids += [each for answer in answers if answer.outputs for each in answer.outputs.token_ids]
                return ids

            await run_aio(ask)
    assert "mock_request_started" in {entry["event"] for entry in logs}
    assert "1234" not in repr([{**entry, "request_id": ""} for entry in logs])
