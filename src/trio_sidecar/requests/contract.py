"""What a session needs of a request, of the conversion of its answers, and of the rule for its cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.convert.response import Chunk
    from trio_sidecar.wire import GenerateRequest, GenerateResponse

__all__ = ["CancelAtOnce", "CancelPolicy", "Converted", "Responder", "ResponseState"]


class ResponseState(Protocol):
    """The part of a converted request that the session itself reads."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...


class Converted(Protocol):
    """A request in the engine's terms; see ``convert.request.ConvertedRequest``."""

    @property
    def wire(self) -> GenerateRequest:
        """What the engine gets."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """What goes beside it."""
        ...

    @property
    def response(self) -> ResponseState:
        """What converting the answers needs."""
        ...


class Responder(Protocol):
    """Converts the answers to one request; see ``convert.response.ResponseConverter``."""

    @property
    def finished(self) -> bool:
        """Whether the terminal was converted."""
        ...

    @property
    def aborted_by_engine(self) -> bool:
        """Whether that terminal says that the engine aborted the request."""
        ...

    @property
    def completion_tokens(self) -> int:
        """Output tokens in what was converted."""
        ...

    def convert(self, response: GenerateResponse) -> Chunk | None:
        """One answer as a chunk; None if it holds nothing for Dynamo."""
        ...

    def cancelled(self) -> Chunk:
        """The cancelled terminal, whose usage counts what was converted."""
        ...


class CancelPolicy(Protocol):
    """When a request cancel may act."""

    def ready(self) -> bool:
        """Whether a cancel may act now."""
        ...

    def observe(self, response: GenerateResponse) -> None:
        """Look at one answer of the engine, before it is delivered."""
        ...


class CancelAtOnce:
    """A cancel acts whenever it comes: aggregated, prefill, encode (spec 10.1)."""

    __slots__ = ()

    def ready(self) -> bool:
        """Always."""
        return True

    def observe(self, response: GenerateResponse) -> None:
        """Nothing depends on the answers."""
