"""The bounded buffer between a request's pump and the consumer of its chunks; both are asyncio tasks of one loop.

It decouples their speeds and absorbs bursts: the consumer takes all that has arrived, merged into one chunk, so that
under overload the cost per token falls instead of a queue growing. When it is full the pump waits and does not read the
engine's stream, which is how backpressure reaches the engine.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.bridge import AioSignal

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_sidecar.convert.response import Chunk

__all__ = ["BufferLimit", "BufferStatistics", "OutputBuffer"]


@attrs.frozen(kw_only=True, slots=True)
class BufferLimit:
    """How much one request may have waiting for its consumer.

    A chunk that alone exceeds ``max_tokens`` is still accepted by an empty buffer.
    """

    max_tokens: int = attrs.field(default=512, validator=attrs.validators.ge(1))
    max_chunks: int = attrs.field(default=64, validator=attrs.validators.ge(1))


@attrs.frozen(kw_only=True, slots=True)
class BufferStatistics:
    """What a buffer holds and has seen.

    Attributes:
        chunks: Chunks waiting now.
        tokens: Tokens waiting now.
        peak_chunks: The most chunks that ever waited.
        peak_tokens: The most tokens that ever waited.
        put: Chunks put in.
        taken: Chunks taken out; fewer than were put in where chunks were merged.
        delivered_tokens: Tokens taken out.
        stalls: How often the producer had to wait.
    """

    chunks: int
    tokens: int
    peak_chunks: int
    peak_tokens: int
    put: int
    taken: int
    delivered_tokens: int
    stalls: int


class OutputBuffer:
    """A queue for one producer and one consumer with an explicit end.

    The end is one of: :meth:`close` after a terminal chunk, :meth:`fail` with an error that the consumer meets after
    the chunks before it, or :meth:`cut`, which drops what waits, an end included, and puts one last chunk in its place.
    What comes after an end is ignored, but a cut counts until the consumer has reached the end. None of them waits, so
    they may be called from either flavour.

    Args:
        limit: When the producer must wait.
        merge: Joins adjacent chunks, oldest first, or None to hand out one by one.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_items",
        "_limit",
        "_merge",
        "_peak_chunks",
        "_peak_tokens",
        "_put",
        "_readable",
        "_stalls",
        "_taken",
        "_tokens",
        "_writable",
        "delivered_tokens",
    )

    def __init__(self, limit: BufferLimit, *, merge: Callable[..., Chunk] | None) -> None:
        self._limit = limit
        self._merge = merge
        self._items: deque[Chunk] = deque()
        self._tokens = 0
        self._ended = False
        self._error: BaseException | None = None
        self._readable = AioSignal()
        self._writable = AioSignal()
        self._put = self._taken = self._stalls = self._peak_chunks = self._peak_tokens = 0
        self.delivered_tokens = 0

    @property
    def ended(self) -> bool:
        """Whether an end was set; chunks may still wait before it."""
        return self._ended

    @property
    def exhausted(self) -> bool:
        """Whether an end was set and the consumer has taken everything, the error included."""
        return self._ended and not self._items and self._error is None

    # -- Producer ---------------------------------------------------------------------------------------------------

    def put_nowait(self, chunk: Chunk) -> bool:
        """Add a chunk and return True, or return False because the buffer is full; after the end, drop it."""
        if self._ended:
            return True
        tokens = self._tokens + len(chunk["token_ids"])
        if self._items and (tokens > self._limit.max_tokens or len(self._items) >= self._limit.max_chunks):
            return False
        self._items.append(chunk)
        self._tokens = tokens
        self._put += 1
        self._peak_tokens = max(self._peak_tokens, tokens)
        self._peak_chunks = max(self._peak_chunks, len(self._items))
        self._readable.call()
        return True

    async def aio_put(self, chunk: Chunk) -> None:
        """Add a chunk, when there is room; after the end, drop it."""
        if self.put_nowait(chunk):
            return
        self._stalls += 1
        while not self.put_nowait(chunk):
            await self._writable.aio_wait()

    async def aio_wait_exhausted(self) -> None:
        """Wait until the consumer has taken everything up to the end."""
        while not self.exhausted:
            await self._writable.aio_wait()

    def close(self) -> None:
        """The end: the terminal chunk was put."""
        self._end()

    def fail(self, error: BaseException) -> None:
        """The end: after the chunks that wait, the consumer gets this error."""
        if not self._ended:
            self._error = error
            self._end()

    def cut(self, last: Chunk | None) -> None:
        """The end, at once: drop what waits; the consumer gets this chunk, if any, and nothing else."""
        if self._ended and self.exhausted:
            return
        self._items.clear()
        self._tokens = 0
        self._error = None
        if last is not None:
            self._items.append(last)
            self._tokens = len(last["token_ids"])
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._readable.call()
        self._writable.call()

    # -- Consumer ---------------------------------------------------------------------------------------------------

    async def aio_take(self) -> Chunk | None:
        """Wait for chunks, then take all that have arrived, merged; without merging, the oldest one.

        Returns:
            A chunk, or None once everything before the end has been taken.

        Raises:
            BaseException: The error that ended the stream, once.
        """
        while not self._items:
            if self._ended:
                error, self._error = self._error, None
                self._writable.call()
                if error is not None:
                    raise error
                return None
            await self._readable.aio_wait()
        items = self._items
        if self._merge is None or len(items) == 1:
            chunk = items.popleft()
            self._tokens -= len(chunk["token_ids"])
        else:
            chunk = self._merge(*items)
            items.clear()
            self._tokens = 0
        self._taken += 1
        self.delivered_tokens += len(chunk["token_ids"])
        self._writable.call()
        return chunk

    def statistics(self) -> BufferStatistics:
        """What it holds and has seen."""
        return BufferStatistics(
            chunks=len(self._items),
            tokens=self._tokens,
            peak_chunks=self._peak_chunks,
            peak_tokens=self._peak_tokens,
            put=self._put,
            taken=self._taken,
            delivered_tokens=self.delivered_tokens,
            stalls=self._stalls,
        )
