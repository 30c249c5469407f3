"""Short names for converting a request in a test, and for seeing it refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.samples import model_facts
from trio_sidecar.convert.request import ConvertedRequest, convert_request
from trio_sidecar.errors import ErrorKind, InvalidRequest

if TYPE_CHECKING:
    from trio_sidecar.convert.request import ModelFacts
    from trio_sidecar.wire import GenerateRequest


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
