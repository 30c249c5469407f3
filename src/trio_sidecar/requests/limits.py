"""How long an engine may be silent towards a request (asyncio-flavoured callbacks).

One timer for a request, however many tokens it gets: when it rings, it looks at when the wait for the engine began that
is under way now, and sets itself anew for what is left. So a token costs one look at the clock and no timer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.bridge import aio_now
from trio_sidecar.bridge.listen import aio_call_later

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_sidecar.bridge.listen import AioTimer

__all__ = ["SilenceLimits", "SilenceWatch"]

_EARLY_SECS = 0.001
"""How much too early a timer may ring: loops count time in steps."""


@attrs.frozen(slots=True, kw_only=True)
class SilenceLimits:
    """How long an engine may take, in seconds; 0 is no limit.

    Attributes:
        first_response_secs: From the request to the engine's first message, its admission included.
        idle_secs: Between two messages. Time in which we do not ask for one, because the client does not read, does not
            count.
    """

    first_response_secs: float = 0.0
    idle_secs: float = 0.0


class Hearing:
    """When any request has heard from the engine, on the clock of :func:`~trio_sidecar.bridge.aio_now`.

    Attributes:
        heard_at: The last time.
        gave_up: A request has run into a limit since then.
    """

    __slots__ = ("gave_up", "heard_at")

    def __init__(self) -> None:
        self.heard_at = -math.inf
        self.gave_up = False

    def note(self, moment: float) -> None:
        """Somebody has heard from it."""
        self.heard_at = moment
        self.gave_up = False


class SilenceWatch:
    """The watch over one request.

    Args:
        limits: How long.
        hearing: Told of what this request hears.
        expire: Called once, with a sentence, when the engine has been silent for too long.

    Attributes:
        since: When the wait for the engine began; None while nobody waits for it.
    """

    __slots__ = ("_expire", "_first", "_hearing", "_limits", "_timer", "since")

    def __init__(self, limits: SilenceLimits, expire: Callable[[str], None], hearing: Hearing | None = None) -> None:
        self._limits = limits
        self._hearing = hearing or Hearing()
        self._expire = expire
        self._first = True
        self.since: float | None = None
        self._timer: AioTimer | None = None

    def begin(self) -> None:
        """The request goes to the engine now."""
        self.since = aio_now()
        self._arm(self._limit)

    def asking(self) -> None:
        """From here on it is the engine that is waited for; for its first message it has been since the request."""
        if not self._first:
            self.since = now = aio_now()
            self._hearing.note(now)

    def answered(self) -> None:
        """It has sent something; until :meth:`asking` nobody waits for it."""
        self.since = None
        if self._first:
            self._first = False
            self._hearing.note(aio_now())
            self._disarm()
            self._arm(self._limit)

    def end(self) -> None:
        """The request is over."""
        self.since = None
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _limit(self) -> float:
        return self._limits.first_response_secs if self._first else self._limits.idle_secs

    def _arm(self, seconds: float) -> None:
        if seconds > 0:
            self._timer = aio_call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        limit = self._limit
        silent = 0.0 if self.since is None else aio_now() - self.since
        if silent < limit - _EARLY_SECS:
            self._arm(limit - silent)
            return
        self._hearing.gave_up = True
        message = "first response" if self._first else "further message"
        self._expire(f"the engine has sent no {message} for {limit:g} s")
