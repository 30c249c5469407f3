"""When a request cancel may act.

A decode worker's engine fetches the KV blocks that a prefill worker keeps for it. If the request vanished before that,
nobody would tell the prefill worker to release them. Its first output token says that the transfer is over, so a cancel
waits for it (spec 10.2). Only the end of the worker itself does not wait (R10.12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.requests.contract import CancelAtOnce

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_sidecar.requests.contract import CancelPolicy
    from trio_sidecar.wire import GenerateResponse

__all__ = ["CancelAfterFirstToken", "cancel_policy"]


class CancelAfterFirstToken:
    """A cancel waits until the engine has shown its first token, or its end (R10.5 to R10.11).

    Args:
        notify_first_token: Called once, when the first output with tokens arrives, before it is delivered (R10.7).
    """

    __slots__ = ("_notify", "_ready")

    def __init__(self, notify_first_token: Callable[[], None]) -> None:
        self._notify: Callable[[], None] | None = notify_first_token
        self._ready = False

    def ready(self) -> bool:
        """Whether the engine has come that far."""
        return self._ready

    def observe(self, response: GenerateResponse) -> None:
        """Look for tokens or the end; a message without either changes nothing (R10.9)."""
        outputs = response.outputs
        if self._notify is None or outputs is None:
            return
        if outputs.token_ids:
            self._ready = True
            notify, self._notify = self._notify, None
            notify()
        elif outputs.finish_info is not None:
            self._ready = True


def cancel_policy(mode: DisaggregationMode, notify_first_token: Callable[[], None]) -> CancelPolicy:
    """The policy for one request.

    Args:
        mode: This worker's role.
        notify_first_token: Tells Dynamo that a decode request has passed its first token; other roles do not call it.
    """
    return CancelAfterFirstToken(notify_first_token) if mode is DisaggregationMode.DECODE else CancelAtOnce()
