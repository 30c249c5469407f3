"""Short names for converting requests and answers in a test, and for seeing a request refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.samples import candidates, model_facts, tokens
from trio_sidecar.convert.request import ConvertedRequest, ResponseOptionsState, convert_request
from trio_sidecar.convert.response import ResponseConverter
from trio_sidecar.errors import ErrorKind, InvalidRequest

if TYPE_CHECKING:
    from trio_sidecar.convert.request import ModelFacts
    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.wire import GenerateRequest, GenerateResponse


def shown(value: object) -> str:
    """A parameter as part of a test's id, short and without backslashes.

    pytest escapes them once more whenever it collects again in one process, as it does for mutation tests, and would
    not know the id again.
    """
    return ascii(value).replace("\\", "/")[:60]


def convert(request: dict[str, Any], model: ModelFacts | None = None) -> ConvertedRequest:
    """Convert for the fixtures' model unless another is given."""
    return convert_request(request, request_id="request-0", model=model or model_facts())


def wire(request: dict[str, Any], model: ModelFacts | None = None) -> GenerateRequest:
    """The message that goes out."""
    return convert(request, model).wire


def refused(request: dict[str, Any], model: ModelFacts | None = None) -> str:
    """The message that the request is refused with."""
    with pytest.raises(InvalidRequest) as caught:
        convert(request, model)
    assert ErrorKind.INVALID_ARGUMENT is caught.value.kind
    return str(caught.value)


def dig(message: object, path: str) -> object:
    """A field of a nested message by its dotted path."""
    for name in path.split("."):
        message = getattr(message, name)
    return message


def converter(**options: Any) -> ResponseConverter:
    """A converter for a prompt of three tokens unless the options say otherwise."""
    return ResponseConverter(ResponseOptionsState(**{"prompt_tokens": 3, **options}))


def run(responses: list[GenerateResponse], **options: Any) -> list[Chunk]:
    """All chunks of a whole stream."""
    convert_one = converter(**options).convert
    return [chunk for response in responses if (chunk := convert_one(response)) is not None]


def two_tokens(**changes: Any) -> GenerateResponse:
    """Two tokens with logprobs and one candidate each."""
    columns: dict[str, Any] = {
        "logprobs": [-0.25, -0.75],
        "ranks": [1, 3],
        "candidate_tokens": [candidates((43, -0.5, 2)), candidates((51, -0.5, 1))],
    }
    return tokens(42, 50, text=" two", **{**columns, **changes})
