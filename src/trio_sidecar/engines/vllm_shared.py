"""One vLLM for all who open the engine, since starting one takes long (Trio-flavoured).

A worker opens its engine twice: to look at it, and to serve with it. The first opening starts vLLM, within the
opener's own scope, so that a stop ends the start; vLLM then stays until the whole block is left.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from trio_sidecar.engines.vllm import VllmEngine, open_vllm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.config import VllmSettings

__all__ = ["OpenShared", "SharedVllm", "serve_worker"]

T = TypeVar("T")


class OpenShared(Protocol):
    """Opens the engine, the first time or again."""

    def __call__(self, *, bootstrap: bool) -> AbstractAsyncContextManager[VllmEngine]:
        """Open it; ``bootstrap`` makes no difference here."""
        ...


class SharedVllm:
    """A vLLM that is started when it is first opened.

    Args:
        nursery: Where it lives.
        open_engine: Starts it; for tests.
    """

    def __init__(
        self, nursery: trio.Nursery, open_engine: Callable[[], AbstractAsyncContextManager[VllmEngine]]
    ) -> None:
        self._nursery = nursery
        self._open_engine = open_engine
        self._engine: VllmEngine | None = None
        self._failed = trio.Event()
        self._failure: Exception | None = None
        self._close = trio.Event()

    @asynccontextmanager
    async def open(self, *, bootstrap: bool) -> AsyncIterator[VllmEngine]:  # noqa: ARG002 - the worker's protocol
        """Use the engine for the length of a block; if it fails for good, the block is cancelled and the error raised.

        Raises:
            SidecarError: As :func:`~trio_sidecar.engines.vllm.open_vllm`.
        """
        if self._engine is None:
            self._engine = await self._nursery.start(self._hold)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_if_failed, nursery.cancel_scope)
            yield self._engine
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure from None  # what the cancelled block raised says nothing

    def close(self) -> None:
        """End vLLM; the nursery waits for that."""
        self._close.set()

    async def _hold(  # noqa: ASYNC114 - started in one place
        self, *, task_status: trio.TaskStatus[VllmEngine] = trio.TASK_STATUS_IGNORED
    ) -> None:
        started = False
        try:
            async with self._open_engine() as engine:
                started = True
                task_status.started(engine)
                await self._close.wait()
        except Exception as error:
            if not started:
                raise
            self._failure = error
            self._failed.set()

    async def _cancel_if_failed(self, scope: trio.CancelScope) -> None:
        await self._failed.wait()
        scope.cancel()


async def serve_worker(settings: VllmSettings, worker: Callable[[OpenShared], Awaitable[T]]) -> T:
    """Run a worker over a vLLM in this process; vLLM starts when the worker looks at it, and ends after it."""
    async with trio.open_nursery() as nursery:
        shared = SharedVllm(nursery, lambda: open_vllm(settings))
        try:
            result = await worker(shared.open)
        finally:
            shared.close()
    return result
