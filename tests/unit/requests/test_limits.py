"""The watch over an engine's silence, by itself and in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.bridge import aio_sleep, run_aio
from trio_sidecar.requests.limits import Hearing, SilenceLimits, SilenceWatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from trio.testing import MockClock

    Loop = asyncio.AbstractEventLoop

LIMITS = SilenceLimits(first_response_secs=10.0, idle_secs=4.0)
NOTHING, FURTHER = (f"the engine has sent no {what}" for what in ("first response for 10 s", "further message for 4 s"))


async def watched(*steps: str | float, limits: SilenceLimits = LIMITS) -> list[tuple[float, str]]:
    """When the watch rang, and what it said; steps are its methods, and seconds that pass between them."""
    rung: list[tuple[float, str]] = []
    start = trio.current_time()

    async def aio_main(steps: Sequence[str | float]) -> None:
        watch = SilenceWatch(limits, lambda reason: rung.append((trio.current_time() - start, reason)))
        watch.begin()
        for step in steps:
            if isinstance(step, str):
                getattr(watch, step)()
            else:
                await aio_sleep(step)
        watch.end()
        watch.end()
        await aio_sleep(1000)

    await run_aio(aio_main, steps)
    return [(round(moment, 1), reason) for moment, reason in rung]


@pytest.mark.rule("FR-017")
@pytest.mark.parametrize(
    ("steps", "rung"),
    [
        (("asking", 9.9), []),
        (("asking", 100), [(10.0, NOTHING)]),
        # The first response counts from the request on, admission included, not from when it was asked for.
        ((100,), [(10.0, NOTHING)]),
        ((9.0, "asking", 100), [(10.0, NOTHING)]),
        (("asking", 9.0, "answered", "asking", 3.9), []),
        (("asking", 9.0, "answered", "asking", 100), [(13.0, FURTHER)]),
        (("asking", 1.0, "answered", "asking", 3.0, "answered", "asking", 100), [(8.0, FURTHER)]),
        # While nobody asks the engine owes nothing, however often the watch looks.
        (("asking", 1.0, "answered", 100), []),
        (("asking", 1.0, "answered", 100, "asking", 3.9), []),
        (("asking", 1.0, "answered", 100, "asking", 100), [(105.0, FURTHER)]),
        # It looked at 5.0, half a second too early.
        (("asking", 1.0, "answered", 0.5, "asking", 100), [(5.5, FURTHER)]),
    ],
)
async def test_when_it_rings(
    autojump_clock: MockClock, aio_loop: Loop, steps: tuple[str | float, ...], rung: list[tuple[float, str]]
) -> None:
    """Once, when the limit of the wait that is under way has passed, and never after the end."""
    assert rung == await watched(*steps)


@pytest.mark.parametrize(
    ("limits", "rung"),
    [
        (SilenceLimits(), []),
        (SilenceLimits(first_response_secs=0.5), []),
        (SilenceLimits(idle_secs=0.5), [(1.5, "the engine has sent no further message for 0.5 s")]),
    ],
)
async def test_nought_is_no_limit(
    autojump_clock: MockClock, aio_loop: Loop, limits: SilenceLimits, rung: list[tuple[float, str]]
) -> None:
    """Each of the two by itself."""
    steps = ("asking", 0.1, "answered", 0.9, "asking", 100)
    assert rung == await watched(*steps, limits=limits)
    if not limits.first_response_secs:
        assert [] == await watched("asking", 100, limits=limits)


@pytest.mark.rule("FR-017")
async def test_what_others_hear_of_it(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """Nothing before the request begins; since when it waits, and at what moment the engine was heard."""
    hearing = Hearing()

    async def aio_main() -> None:
        watch = SilenceWatch(LIMITS, pytest.fail, hearing)
        assert watch.since is None
        began_at = trio.current_time()
        watch.begin()
        await aio_sleep(3)
        assert watch.since == pytest.approx(began_at)
        assert hearing.heard_at == float("-inf")
        watch.answered()
        assert hearing.heard_at == pytest.approx(began_at + 3)
        assert watch.since is None
        watch.end()

    await run_aio(aio_main)
