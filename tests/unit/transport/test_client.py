"""Calls over a pool that only takes notes: what goes out, what comes back, and what a caller reads (spec 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import attrs
import pytest
import trio

from trio_sidecar.bridge import aio_checkpoint, aio_sleep, run_aio
from trio_sidecar.errors import ConnectError, ProtocolError, RpcError, StatusCode
from trio_sidecar.transport.client import Client, rpc_label
from trio_sidecar.transport.connection import NotProcessed
from trio_sidecar.wire import HealthCheckRequest, HealthCheckResponse, HealthCheckResponseServingStatus
from trio_sidecar.wire.codec import encode
from trio_sidecar.wire.methods import HEALTH_CHECK, LIST_LORAS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from trio.testing import MockClock

    Loop = asyncio.AbstractEventLoop

REQUEST = HealthCheckRequest(service="vllm.Inference")
ANSWER = HealthCheckResponse(status=HealthCheckResponseServingStatus.SERVING)
SIZE = len(encode(REQUEST))


@attrs.define(eq=False)
class FakePool:
    """A pool of one connection, the connection, and its stream.

    Attributes:
        batches: What the stream gives, one after another, then its end; an error is raised, a number waited for.
        refusals: Raised on entering, one per try.
        hopeless: Raised instead of giving a lease.
        limit: The largest message.
        opened: What calls were made with.
        left: What calls were left with.
        leased: Leases that were not given back.
        urgent: Of each lease, whether it was asked for urgently.
    """

    batches: list[Any] = attrs.field(factory=list)
    refusals: list[Exception] = attrs.field(factory=list)
    hopeless: Exception | None = None
    limit: int = 1000
    opened: list[tuple[Any, ...]] = attrs.field(factory=list)
    left: list[Any] = attrs.field(factory=list)
    leased: list[Any] = attrs.field(factory=list)
    urgent: list[bool] = attrs.field(factory=list)
    peer: str = "the engine"

    @property
    def settings(self) -> FakePool:
        return self

    @property
    def max_message_bytes(self) -> int:
        return self.limit

    @property
    def connection(self) -> FakePool:
        return self

    async def aio_lease(self, *, urgent: bool) -> Any:
        self.urgent.append(urgent)
        await aio_checkpoint()
        if self.hopeless is not None:
            raise self.hopeless
        lease = attrs.make_class("Lease", ["connection"], eq=False)(self)
        self.leased.append(lease)
        return lease

    def release(self, lease: Any) -> None:
        self.leased.remove(lease)

    def aio_open(self, path: str, request: bytes, *, metadata: Mapping[str, str], timeout_secs: float | None) -> Self:
        self.opened.append((path, request, dict(metadata), timeout_secs))
        return self

    async def __aenter__(self) -> Self:
        """Refuse or not."""
        await aio_checkpoint()
        if self.refusals:
            raise self.refusals.pop(0)
        return self

    async def __aexit__(self, *ended: object) -> None:
        """Note how it ended."""
        self.left.append(ended)
        await aio_checkpoint()  # noqa: ASYNC102 - asyncio-flavoured

    async def aio_receive(self) -> list[bytes]:
        await aio_checkpoint()
        batch = self.batches.pop(0) if self.batches else []
        if isinstance(batch, Exception):
            raise batch
        if isinstance(batch, float):
            await aio_sleep(batch)
            return await self.aio_receive()
        return [encode(message) if isinstance(message, HealthCheckResponse) else message for message in batch]


async def unary(pool: Any, **more: Any) -> HealthCheckResponse:
    async def aio_main() -> HealthCheckResponse:
        return await Client(pool).aio_unary(HEALTH_CHECK, REQUEST, **more)

    return await run_aio(aio_main)


async def stream(pool: Any, **more: Any) -> list[HealthCheckResponse]:
    async def aio_main() -> list[HealthCheckResponse]:
        async with Client(pool).aio_stream(HEALTH_CHECK, REQUEST, **more) as answers:
            return [*await answers.aio_receive(), *await answers.aio_receive()]

    return await run_aio(aio_main)


@pytest.mark.rule("R4.4")
def test_calls_are_named_for_people() -> None:
    """By their own names; only health has a name that says nothing without its service."""
    assert ("Health.Check", "ListLoras") == (rpc_label(HEALTH_CHECK), rpc_label(LIST_LORAS))


@pytest.mark.parametrize("call", [unary, stream])
async def test_a_call_carries_what_it_was_given(aio_loop: Loop, call: Any) -> None:
    """Path, request, metadata and timeout reach the connection; the lease goes back."""
    pool = FakePool([[ANSWER]])
    await call(pool, metadata={"x-rank": "3"}, timeout_secs=5.0)
    assert [("/grpc.health.v1.Health/Check", encode(REQUEST), {"x-rank": "3"}, 5.0)] == pool.opened
    assert ([(None, None, None)], []) == (pool.left, pool.leased)


@pytest.mark.parametrize("call", [unary, stream])
async def test_a_call_without_more_carries_nothing_more(aio_loop: Loop, call: Any) -> None:
    """No metadata, and no timeout."""
    pool = FakePool([[ANSWER]])
    await call(pool)
    assert [("/grpc.health.v1.Health/Check", encode(REQUEST), {}, None)] == pool.opened
    assert [call is unary] == pool.urgent


async def test_a_stream_may_be_urgent(aio_loop: Loop) -> None:
    """Then it does not wait behind others."""
    pool = FakePool([[ANSWER]])
    await stream(pool, urgent=True)
    assert [True] == pool.urgent


async def test_a_unary_call_gives_its_one_message(aio_loop: Loop) -> None:
    """As a message."""
    assert await unary(FakePool([[ANSWER]])) == ANSWER


@pytest.mark.parametrize(
    ("batches", "count"),
    [([], 0), ([[ANSWER, ANSWER]], 2), ([[ANSWER], [ANSWER]], 2), ([[ANSWER, ANSWER], [ANSWER]], 3)],
)
async def test_any_other_number_of_messages_is_the_peers_fault(aio_loop: Loop, batches: list[Any], count: int) -> None:
    """The error names the peer, the call and the number."""
    with pytest.raises(ProtocolError) as caught:
        await unary(FakePool([*batches]))
    sentence = f"Health.Check: {count} messages where one is due"
    assert ("the engine", sentence) == (caught.value.peer, caught.value.reason)


async def test_a_call_without_messages_is_not_read_again(aio_loop: Loop) -> None:
    """After its end a stream is not asked once more: what it would say then is nobody's answer."""
    with pytest.raises(ProtocolError, match="0 messages"):
        await unary(FakePool([[], RpcError(StatusCode.INTERNAL, "asked again")]))


async def test_the_status_after_a_message_counts(aio_loop: Loop) -> None:
    """An error that comes behind the answer is the call's end."""
    with pytest.raises(RpcError) as caught:
        await unary(FakePool([[ANSWER], RpcError(StatusCode.ABORTED, "in the end")]))
    assert "Health.Check: in the end (Aborted)" == str(caught.value)


@pytest.mark.parametrize("call", [unary, stream])
async def test_bytes_that_are_no_message_are_the_peers_fault(aio_loop: Loop, call: Any) -> None:
    """The error names the peer and the call, and has the decoder's reason."""
    with pytest.raises(ProtocolError) as caught:
        await call(FakePool([[b"\xff"]]))
    assert "the engine" == caught.value.peer
    assert caught.value.reason.startswith("Health.Check: ")
    assert caught.value.reason == f"Health.Check: {caught.value.__cause__}"


@pytest.mark.rule("R3.12")
async def test_a_request_over_the_limit_is_not_sent(aio_loop: Loop) -> None:
    """One at the limit is; the error has both numbers."""
    pool = FakePool([[ANSWER]], limit=SIZE)
    await unary(pool)
    pool.limit = SIZE - 1
    with pytest.raises(RpcError) as caught:
        await unary(pool)
    assert (StatusCode.RESOURCE_EXHAUSTED, "Health.Check") == (caught.value.status, caught.value.rpc)
    assert f"the request takes {SIZE} bytes, more than the limit of {SIZE - 1}" == caught.value.detail
    assert 1 == len(pool.opened)


async def test_without_a_connection_a_call_is_unavailable(aio_loop: Loop) -> None:
    """With the pool's reason, and the call's name."""
    with pytest.raises(RpcError) as caught:
        await unary(FakePool(hopeless=ConnectError("no connection to the engine")))
    assert "Health.Check: no connection to the engine (Unavailable)" == str(caught.value)


async def test_a_call_that_was_not_begun_is_sent_three_times(aio_loop: Loop) -> None:
    """Then the caller learns of it; every lease goes back."""
    pool = FakePool([[ANSWER]], [NotProcessed("draining"), NotProcessed("draining")])
    assert await unary(pool) == ANSWER
    cause = OSError("why")
    pool.refusals = [NotProcessed("draining") for _ in range(3)]
    pool.refusals[-1].__cause__ = cause
    with pytest.raises(NotProcessed) as caught:
        await unary(pool)
    assert "Health.Check: draining (Unavailable)" == str(caught.value)
    assert cause is caught.value.__cause__
    assert (6, []) == (len(pool.opened), pool.leased)


async def test_a_refusal_is_final(aio_loop: Loop) -> None:
    """The peer has begun the call: it is not sent again, and its error is named after it."""
    cause = OSError("why")
    refusal = RpcError(StatusCode.INVALID_ARGUMENT, "no such service")
    refusal.__cause__ = cause
    pool = FakePool(refusals=[refusal])
    with pytest.raises(RpcError) as caught:
        await unary(pool)
    assert "Health.Check: no such service (InvalidArgument)" == str(caught.value)
    assert cause is caught.value.__cause__
    assert (1, []) == (len(pool.opened), pool.leased)


async def test_a_call_is_left_with_what_ended_it(aio_loop: Loop) -> None:
    """So that the connection can tell a stream that was left early from one that was read to its end."""
    pool = FakePool([[ANSWER]])

    async def aio_main() -> None:
        async with Client(pool).aio_stream(HEALTH_CHECK, REQUEST):  # type: ignore[arg-type]
            reason = "changed my mind"
            raise LookupError(reason)

    with pytest.raises(LookupError) as caught:
        await run_aio(aio_main)
    ((kind, error, traceback),) = pool.left
    assert (LookupError, caught.value, []) == (kind, error, pool.leased)
    assert traceback is not None


# -- Time


async def test_a_unary_call_has_its_time(autojump_clock: MockClock, aio_loop: Loop) -> None:
    """It ends when that is over, whatever the peer does; one that is in time is not touched."""
    assert await unary(FakePool([4.9, [ANSWER]]), timeout_secs=5.0) == ANSWER
    started_at = trio.current_time()
    pool = FakePool([1000.0, [ANSWER]])
    with pytest.raises(RpcError) as caught:
        await unary(pool, timeout_secs=5.0)
    assert pytest.approx(5.0, abs=0.01) == trio.current_time() - started_at
    assert StatusCode.DEADLINE_EXCEEDED is caught.value.status
    assert "Health.Check: no answer within 5s (DeadlineExceeded)" == str(caught.value)
    assert [] == pool.leased


@pytest.mark.parametrize("allowed", [None, 5.0])
async def test_a_timeout_of_somebody_else_is_not_the_calls(aio_loop: Loop, allowed: float | None) -> None:
    """Only its own time makes it DEADLINE_EXCEEDED."""
    with pytest.raises(TimeoutError, match="another"):
        await unary(FakePool([TimeoutError("another")]), timeout_secs=allowed)
