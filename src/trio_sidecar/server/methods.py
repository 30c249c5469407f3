"""What the server answers each call with: the tables of the contract, over an engine (asyncio-flavoured)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trio_sidecar.metrics import CallMeter
from trio_sidecar.server.call import ServerCall
from trio_sidecar.server.merge import Merger
from trio_sidecar.server.traced import TracedCall
from trio_sidecar.tracing import NO_TRACES
from trio_sidecar.wire import GenerateRequest, GenerateResponse
from trio_sidecar.wire.methods import CONTROL_METHODS, GENERATE, GENERATE_STREAM, HEALTH_CHECK, HEALTH_WATCH

if TYPE_CHECKING:
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.server.health import HealthFace
    from trio_sidecar.tracing import Tracer
    from trio_sidecar.wire.methods import Method

__all__ = ["Handler", "method_table"]

Handler = Callable[[ServerCall], Awaitable[None]]


def method_table(
    engine: Engine, health: HealthFace, tracer: Tracer = NO_TRACES, meter: CallMeter | None = None
) -> dict[str, Handler]:
    """Every call that the server knows, by path."""
    control: dict[str, Handler] = {method.path: partial(_aio_control, engine, method) for method in CONTROL_METHODS}
    counted = meter or CallMeter()
    return control | {
        GENERATE.path: partial(_aio_generate, engine, tracer, counted),
        GENERATE_STREAM.path: partial(_aio_generate_stream, engine, tracer, counted),
        HEALTH_CHECK.path: health.aio_check,
        HEALTH_WATCH.path: health.aio_watch,
    }


async def _aio_generate(engine: Engine, tracer: Tracer, meter: CallMeter, call: ServerCall) -> None:
    with TracedCall(tracer, call) as traced:
        request = await call.aio_request(GenerateRequest)
        merger = Merger()
        traced.asking()
        async with engine.aio_generate(request, traced.metadata) as stream:
            traced.accepted()
            while answers := await stream.aio_receive():
                traced.answered(answers)
                _count(meter, answers)
                merger.add(answers)
        await call.aio_send([merger.result()])


async def _aio_generate_stream(engine: Engine, tracer: Tracer, meter: CallMeter, call: ServerCall) -> None:
    with TracedCall(tracer, call) as traced:
        request = await call.aio_request(GenerateRequest)
        traced.asking()
        async with engine.aio_generate(request, traced.metadata) as stream:
            traced.accepted()
            # Some clients wait for the headers before they read, and rely on them to cancel a queued request.
            call.send_headers()
            while answers := await stream.aio_receive():
                traced.answered(answers)
                _count(meter, answers)
                await call.aio_send(answers)


def _count(meter: CallMeter, answers: Sequence[GenerateResponse]) -> None:
    for answer in answers:
        if answer.outputs is not None:
            meter.output_tokens += answer.outputs.num_tokens


async def _aio_control(engine: Engine, method: Method[Any, Any], call: ServerCall) -> None:
    request = await call.aio_request(method.request)
    await call.aio_send([await engine.aio_call(method, request)])
