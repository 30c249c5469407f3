"""Whether an engine that says it serves still answers requests.

The server of an engine may live, and call itself healthy, while what makes the tokens hangs. Requests then only run
into their limits, one after another, and new ones go on coming. So when nobody has heard from the engine for a while,
though somebody waits, it is asked for one token: an engine that is only slow answers that, sooner or later.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    GenerateRequest,
    KvCacheParameters,
    StoppingCriteria,
    TokenIds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from trio_sidecar.engines.contract import EngineStream
    from trio_sidecar.requests.sessions import Sessions

__all__ = ["HangCheck"]

AWAY = frozenset({StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED})
"""How a call ends whose engine could not be asked."""

log = structlog.get_logger("trio_sidecar.requests")


@attrs.define(eq=False, kw_only=True)
class HangCheck:
    """The check of one worker.

    Attributes:
        aio_generate: Opens a generation.
        metadata: What goes beside it.
        sessions: Who waits.
        model: The name of the base model.
        silent_secs: How long the silence has to last, and then how long the one token may take.
    """

    aio_generate: Callable[[GenerateRequest, Mapping[str, str]], AbstractAsyncContextManager[EngineStream]]
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    sessions: Sessions
    model: str
    silent_secs: float

    def suspects(self) -> bool:
        """Whether requests wait, or have run into a limit, and nobody has heard from the engine for too long."""
        return self.sessions.unheard(self.silent_secs)

    async def answers(self) -> bool:
        """Ask for one token; whether an answer came in time (Trio-flavoured).

        A refusal is an answer too: it says nothing of a hang.

        Raises:
            SidecarError: The engine could not be asked.
        """
        log.info("engine_probed", silent_secs=self.silent_secs)
        with trio.move_on_after(self.silent_secs):
            try:
                await run_aio(self._aio_ask)
            except RpcError as error:
                if error.status in AWAY:
                    raise
                log.warning("engine_refused_probe", reason=str(error))
            self.sessions.note_heard()
            return True
        return False

    async def _aio_ask(self) -> None:
        name = f"trio-sidecar-probe-{secrets.token_hex(8)}"
        request = GenerateRequest(
            request_id=name,
            model=self.model,
            token_ids=TokenIds(ids=[0]),
            temperature=0.0,
            stopping=StoppingCriteria(max_new_tokens=1, min_new_tokens=1, ignore_eos=True),
            kv=KvCacheParameters(cache_salt=name),
        )
        async with self.aio_generate(request, self.metadata) as stream:
            await stream.aio_receive()
