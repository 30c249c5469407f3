"""Short ways to make mock engines and to read what they answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trio_sidecar.config import MockReply, MockSettings
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.engines.mock_output import MockOutput
from trio_sidecar.engines.mock_request import MockJob, accept
from trio_sidecar.wire import FinishInfo, GenerateRequest, GenerateResponse, SequenceOutput, StoppingCriteria, TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_sidecar.engines.mock import MockEngine


def mock_settings(**changes: Any) -> MockSettings:
    """Settings without a pace."""
    return MockSettings(**{"ttft_ms": 0.0, "itl_ms": 0.0, **changes})


def token_settings(**changes: Any) -> MockSettings:
    """Settings of token mode without a pace."""
    return mock_settings(reply=MockReply.TOKENS, **changes)


def request_of(
    ids: Sequence[int] = (100, 101, 102), *, stopping: dict[str, Any] | None = None, **fields: Any
) -> GenerateRequest:
    """A request with a token prompt."""
    criteria = None if stopping is None else StoppingCriteria(**stopping)
    return GenerateRequest(token_ids=TokenIds(ids=list(ids)), stopping=criteria, **fields)


def answers_to(request: GenerateRequest, settings: MockSettings) -> list[GenerateResponse]:
    """All answers to a request, without an engine or a clock."""
    facts = MockFacts.resolve(settings)
    output = MockOutput(accept(request, {}, facts), facts)
    answers = [output.prompt_info()]
    while not output.is_finished():
        answers.append(output.step())
    return answers


def job_of(request: GenerateRequest, settings: MockSettings) -> MockJob:
    """What the engine understood."""
    return accept(request, {}, MockFacts.resolve(settings))


def outputs_of(answers: Sequence[GenerateResponse]) -> list[SequenceOutput]:
    """The outputs, without the prompt info."""
    return [answer.outputs for answer in answers if answer.outputs is not None]


def text_of(answers: Sequence[GenerateResponse]) -> str:
    """The whole text."""
    return "".join(output.text for output in outputs_of(answers))


def ids_of(answers: Sequence[GenerateResponse]) -> list[int]:
    """All token ids."""
    return [token for output in outputs_of(answers) for token in output.token_ids]


def finish_of(answers: Sequence[GenerateResponse]) -> FinishInfo:
    """How the last answer ended it."""
    last = outputs_of(answers)[-1].finish_info
    assert last is not None
    return last


async def aio_collect(engine: MockEngine, request: GenerateRequest) -> list[GenerateResponse]:
    """All answers to a request, through the engine."""
    answers: list[GenerateResponse] = []
    async with engine.aio_generate(request, {}) as stream:
        while batch := await stream.aio_receive():
            answers.extend(batch)
    return answers
