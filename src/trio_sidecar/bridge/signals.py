"""POSIX signals for Trio code, the same on both hosts.

Both hosts run Python's own signal handlers promptly in the main thread: Trio through its wake-up socket, uvloop through
its own. So a plain handler that calls ``run_sync_soon``, which is made for signal handlers, is all that is needed.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Interrupt", "SignalReceiver", "open_signals"]

_BACKLOG = 16


class SignalReceiver:
    """The signals that have arrived, in order; iterate with ``async for``."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[int](_BACKLOG)
        self._taken = False

    def __aiter__(self) -> SignalReceiver:
        """The receiver itself."""
        return self

    async def __anext__(self) -> int:
        """Wait for the next signal's number."""
        signum = await self._receive.receive()
        self._taken = True
        return signum

    def put(self, signum: int) -> None:
        """Add one; a backlog of more than sixteen says nothing new and is dropped."""
        with suppress(trio.WouldBlock):
            self._send.send_nowait(signum)

    def close(self) -> None:
        """Raise the signals that nobody took again, unless an earlier one was taken.

        A second SIGTERM while we shut down because of the first must not kill the process when the receiver goes.
        """
        while not self._taken:
            try:
                signum = self._receive.receive_nowait()
            except trio.WouldBlock:
                break
            signal.raise_signal(signum)
        self._send.close()
        self._receive.close()


@contextmanager
def open_signals(*signums: int) -> Iterator[SignalReceiver]:
    """Receive signals in Trio instead of their usual effect; the earlier handlers come back at the end.

    Unlike :func:`trio.open_signal_receiver`, signals that repeat one that was taken are dropped at the end.

    Args:
        signums: Which signals, for example ``signal.SIGTERM, signal.SIGINT``.

    Raises:
        ValueError: No signal was named, or this is not the main thread.
    """
    if not signums:
        reason = "name at least one signal"
        raise ValueError(reason)
    token = trio.lowlevel.current_trio_token()
    receiver = SignalReceiver()

    def handler(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        token.run_sync_soon(receiver.put, signum)

    earlier = {}
    try:
        for signum in signums:
            earlier[signum] = signal.signal(signum, handler)
        yield receiver
    finally:
        for signum, old in earlier.items():
            signal.signal(signum, old)
        receiver.close()


@attrs.define(eq=False)
class Interrupt:
    """SIGINT for a whole run: the first cancels the main task, the second kills the process.

    Attributes:
        hit: Whether SIGINT has come.
        scope: Encloses the main function.
    """

    hit: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _token: trio.lowlevel.TrioToken | None = None

    def arm(self) -> None:
        """Bind to the running Trio; a SIGINT that came earlier takes effect now."""
        self._token = trio.lowlevel.current_trio_token()
        if self.hit:
            self.scope.cancel()

    def disarm(self) -> None:
        """Let go of Trio, before it ends."""
        self._token = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.hit:
            # Whoever presses Ctrl-C twice does not want to wait for cleanup. Raising KeyboardInterrupt at a random
            # point of either host would only break it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self.hit = True
        if self._token is not None:
            self._token.run_sync_soon(self.scope.cancel)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT for the length of the block, if this is the main thread and nobody else handles it."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._on_sigint)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._on_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
