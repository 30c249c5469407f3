"""What the rest of the package knows of tracing: two protocols, and what stands behind them when nobody traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["NO_TRACES", "Activity", "Attribute", "NoTraces", "Span", "Tracer"]

Attribute = str | int | float | bool


class Span(Protocol):
    """A piece of work in a trace."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What makes another service's work a part of this."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether it will be seen; not if whoever began the trace, or a sampler, has decided against it."""
        ...

    def end(self, *, failure: str = "", attributes: Mapping[str, Attribute] | None = None) -> None:
        """It is over; a second end changes nothing.

        Args:
            failure: Why it has failed, in a word from a short list; empty if it has not.
            attributes: What is known of it now.
        """
        ...


class Tracer(Protocol):
    """Makes spans."""

    @property
    def enabled(self) -> bool:
        """Whether anybody wants to see them."""
        ...

    def begin(
        self,
        name: str,
        parent: Span | Mapping[str, str] | None = None,
        *,
        serves: bool = False,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begin a piece of work.

        Nothing is taken from the surroundings: context variables do not cross the border of Trio and asyncio.

        Args:
            name: From a short list.
            parent: What it is a part of: a span of ours, or another service's, as headers; without any, a new trace.
            serves: Whether it answers a request of another service.
            attributes: What is known of it now.
        """
        ...


class _NoSpan:
    __slots__ = ()

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    @property
    def recorded(self) -> bool:
        return False

    def end(self, *, failure: str = "", attributes: Mapping[str, Attribute] | None = None) -> None:
        pass


class NoTraces:
    """Nobody traces."""

    __slots__ = ()

    @property
    def enabled(self) -> bool:
        """Never."""
        return False

    def begin(
        self,
        name: str,  # noqa: ARG002
        parent: Span | Mapping[str, str] | None = None,  # noqa: ARG002
        *,
        serves: bool = False,  # noqa: ARG002
        attributes: Mapping[str, Attribute] | None = None,  # noqa: ARG002
    ) -> Span:
        """Nothing."""
        return _NoSpan()


NO_TRACES = NoTraces()


class Activity:
    """A context manager around work that belongs to no request; an error, or a cancel, that leaves it is its failure.

    Attributes:
        results: Attributes for its end, to be filled inside.
    """

    def __init__(self, tracer: Tracer, name: str, **attributes: Attribute) -> None:
        self.results: dict[str, Attribute] = {}
        self._span = tracer.begin(name, attributes=attributes)

    def __enter__(self) -> Self:
        """It has begun."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """It is over."""
        self._span.end(failure="" if kind is None else kind.__name__, attributes=self.results)
