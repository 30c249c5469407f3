"""All the doctor's questions, asked side by side where they do not depend on each other (Trio-flavoured)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trio_sidecar.doctor.device import examine_engine
from trio_sidecar.doctor.endpoint import examine_endpoint
from trio_sidecar.doctor.report import Finding, Report, Section, failed, skipped
from trio_sidecar.doctor.surroundings import examine_discovery, examine_process
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from trio_sidecar.config import TransportSettings

__all__ = ["Questions", "examine"]


@attrs.frozen(kw_only=True)
class Questions:
    """What to look at.

    Attributes:
        environment: The variables that a worker would see.
        transport: The engine's endpoint; why there is none if that is an error; None if it was not asked for.
        engine: An engine in this process, ``vllm`` or ``mock``; empty for none.
        arguments: Its model and arguments.
        seconds: For each layer.
        engine_seconds: For starting that engine and a short generation.
    """

    environment: Mapping[str, str]
    transport: TransportSettings | InvalidConfig | None = None
    engine: str = ""
    arguments: tuple[str, ...] = ()
    seconds: float = 5.0
    engine_seconds: float = 600.0


async def examine(questions: Questions) -> Report:
    """Look at everything; never raises on account of what is found."""
    found: dict[str, tuple[Finding, ...]] = {}

    async def look(title: str, ask: Callable[[], Awaitable[tuple[Finding, ...]]]) -> None:
        found[title] = await ask()

    async def endpoint() -> tuple[Finding, ...]:
        if questions.transport is None:
            return tuple(skipped(["address"], "name one with --grpc-endpoint"))
        if isinstance(questions.transport, InvalidConfig):
            return (failed("address", str(questions.transport), ""),)
        return await examine_endpoint(questions.transport, seconds=questions.seconds)

    async def surroundings() -> tuple[Finding, ...]:
        return await examine_discovery(questions.environment, seconds=questions.seconds)

    async def engine() -> tuple[Finding, ...]:
        return await examine_engine(questions.engine, questions.arguments, seconds=questions.engine_seconds)

    sections: list[tuple[str, Callable[[], Awaitable[tuple[Finding, ...]]]]] = [
        ("engine endpoint", endpoint),
        ("Dynamo's surroundings", surroundings),
    ]
    if questions.engine:
        sections.append((f"engine {questions.engine} in this process", engine))
    async with trio.open_nursery() as nursery:
        for title, ask in sections:
            nursery.start_soon(look, title, ask)
    process = Section("this process", examine_process(questions.environment))
    return Report((process, *(Section(title, found[title]) for title, _ in sections)))
