"""What must hold in every run, whatever the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from simulation.schedule import QUICK_HANG_SECS, Act, Ending, FaultKind
from trio_sidecar.testing.network import Answer
from trio_sidecar.transport.balance import choose

if TYPE_CHECKING:
    from simulation.client import Client
    from simulation.engine import Record, SimEngine
    from simulation.schedule import ClientPlan
    from simulation.world import World
    from trio_sidecar.lora import LoraManager

__all__ = ["check", "watch"]

PROMPT_SECS = 0.02
"""What counts as at once, where no network is waited for."""

QUIET_SECS = 2.2
"""After that, what a client has dropped must have reached the engine, however slow the network is."""

CLOSE_SECS = 2.0
"""What the end of a worker may take beside grace and drain budget: the pool's second, and the process's last moment."""

DEAD_SECS = 0.4
"""After that long without any connection, and with every attempt refused, no request may wait for one."""

ATTEMPT_SECS = 1.0
"""How long an attempt to connect may take."""

KEEPALIVE_SECS = 0.3
"""Silence after which a connection is pinged, and what the answer may take, in schedules with quick keepalive."""

SILENCE_SECS = 4 * KEEPALIVE_SECS
"""After that long on a connection that carries nothing, a request has its end."""

MOST_PINGS = 3
"""What gRPC servers forgive; runs are shorter than their five minutes."""

WATCH_SECS = 0.2

BACK_SECS = 8.0
"""After that long with an engine that is well, the worker is in service: connections are tried at least every 5 s."""

HARMLESS = frozenset(
    {
        FaultKind.GOAWAY,
        FaultKind.GOAWAY_TWICE,
        FaultKind.SLOW,
        FaultKind.FROZEN,
        FaultKind.RESTRICTED,
    }
)
"""Faults that must not cost any request more than time."""

SUCCESS = ("length", "stop")
CANCELLED = "cancelled"


async def watch(world: World) -> None:
    """Look, now and then, whether the worker's books agree when nothing is under way (Trio-flavoured)."""
    quiet_since = dead_since = well_since = trio.current_time()
    while True:
        await trio.sleep(WATCH_SECS)
        now = trio.current_time()
        under_way = [
            client for client in world.dynamo.clients if client.started_at is not None and client.ended_at is None
        ]
        ended = [client.ended_at for client in world.dynamo.clients if client.ended_at is not None]
        quiet_since = max([quiet_since, *ended])  # one may have lived between two looks
        if under_way:
            quiet_since = now
        elif now - quiet_since >= QUIET_SECS:
            _check_quiet(world)
            quiet_since = now
        if world.engine.links or world.network.answer is not Answer.REFUSE:
            dead_since = now
        if not (world.engine.well and world.dynamo.registered_once) or world.stopped_at is not None:
            well_since = now
        elif now - well_since > BACK_SECS:
            _check_service(world, now - well_since)
            well_since = now
        if world.schedule.keepalive:
            _check_silence(world, under_way, now)
        # An attempt that began while nobody answered takes its whole time, also when others are refused meanwhile.
        limit = DEAD_SECS + (ATTEMPT_SECS if FaultKind.SILENCE in world.engine.touched else 0.0)
        for client in under_way:
            reads = not client.plan.pause_secs  # others may have much to read yet
            if reads and now - max(dead_since, client.started_at or 0.0) > limit:
                world.fault(f"request {client.plan.number} waits, though nothing can serve it")


def _check_service(world: World, secs: float) -> None:
    """The engine is well: the worker takes requests, and what routers know of KV blocks is this engine's."""
    if not world.dynamo.in_service:
        world.fault(f"the worker is not in service, though its engine has been well for {secs:.1f} s")
    heard = [publisher.source for publisher in world.dynamo.publishers if publisher.running]
    if heard != [world.engine.kv_events]:
        world.fault(f"routers hear {heard}, and the engine is at {world.engine.kv_events}")


def _check_silence(world: World, under_way: list[Client], now: float) -> None:
    """With quick keepalive, nobody waits on a connection that was held for long, unless its pings are used up."""
    for client in under_way:
        links = world.engine.records[client.plan.number].links
        link = links[-1] if links else None
        since = world.held_since.get(link) if link is not None else None
        if link is None or not link.held:
            continue
        if since is None:
            world.held_since[link] = now
        elif now - since > SILENCE_SECS and not client.plan.pause_secs and not link.server.protocol.pings:
            world.fault(f"request {client.plan.number} waits on a connection, silent for {now - since:g} s")


def _check_quiet(world: World) -> None:
    """No request is under way: the engine holds nothing, and no place on a connection is taken."""
    engine, remote = world.engine, world.remote
    if held := engine.held_open():
        world.fault(f"the engine still holds requests {[plan.number for plan in held]}, and all clients have their end")
    if remote is not None:
        # The worker's own calls may be under way, or wait for a connection or for room on one.
        slots = remote.pool.slots
        places = sum(slot.open_streams for slot in slots)
        streams = sum(slot.connection.open_streams for slot in slots if slot.connection is not None)
        queued = remote.pool.statistics().queued
        if places != streams or (queued and choose([slot.load() for slot in slots], -1) is not None):
            world.fault(f"the pool is not idle: {streams} streams, {queued} queued, {places} places taken")
    if world.dynamo.engine is not None:
        still_open = world.dynamo.engine._sessions.statistics().open
        if still_open:
            world.fault(f"{still_open} sessions are open, and all clients have their end")
    if all(task.done() for task in world.dynamo.updater.tasks):
        _check_adapters(world)


def _check_adapters(world: World) -> None:
    """No update and no request is under way: no lock is held, and discovery lists what the engine holds."""
    management = world.dynamo.engine._management if world.dynamo.engine is not None else None
    if management is None or not world.dynamo.registered_once:
        return
    manager, records = management._lora, world.dynamo.llm.records
    _check_locks(world, manager)
    replaced = FaultKind.KILLED in world.engine.touched
    if manager.reconciled and not replaced and world.stopped_at is None and records != set(world.engine.adapters.held):
        world.fault(f"discovery lists adapters {records}, the engine holds {set(world.engine.adapters.held)}")


def _check_locks(world: World, manager: LoraManager) -> None:
    for name, entry in manager.locks._entries.items():
        lock = entry.lock
        if entry.users or lock._readers or lock._writing or lock._queue:
            world.fault(f"the lock of adapter {name!r} is still held")
    if manager._mutex.locked():
        world.fault("the lock of all adapters is still held")


def check(world: World) -> None:
    """Everything that can be said at the end."""
    registered = world.dynamo.registered_once
    for text in world.trouble:
        if not registered and world.engine.touched and text.startswith("worker_failed"):
            continue  # an engine that goes away while the worker registers
        world.fault(f"logged as an error: {text}")
    if world.dynamo.engine is not None and world.dynamo.engine._management is not None:
        _check_locks(world, world.dynamo.engine._management._lora)
    for text in world.left_over:
        world.fault(f"left over: {text}")
    _check_end(world)
    for client in world.dynamo.clients:
        if client.started_at is not None:
            _check_client(world, client)


def _check_end(world: World) -> None:
    schedule, engine = world.schedule, world.engine
    if not world.dynamo.registered_once and world.code == 1 and engine.touched:
        return
    if world.stopped_at is None:
        world.fault(f"the worker ended with {world.code}, and nobody had asked it to")
        return
    if world.code != 0:
        world.fault(f"the worker ended with {world.code}, though it was asked to end")
    assert world.ended_at is not None
    took = world.ended_at - world.stopped_at
    if took > schedule.grace_secs + schedule.drain_secs + CLOSE_SECS:
        world.fault(f"the worker took {took:.3f} s to end")
    if engine.open:
        world.fault(f"the engine still holds requests {[plan.number for plan in engine.open.values()]} at the end")
    if any(connection.most_pings > MOST_PINGS for connection in engine.connections):
        world.fault("an engine that counts pings would have closed the connection")
    if any(link.open for link in world.engine.network.links):
        world.fault("a connection is still open at the end")


def _check_client(world: World, client: Client) -> None:
    plan, record = client.plan, world.engine.records[client.plan.number]
    name = f"request {plan.number}"
    expected = plan.tokens[: len(client.tokens)]
    if client.tokens != expected:
        world.fault(f"{name}: got tokens {client.tokens}, the engine's are {plan.tokens}")
    if client.after_end:
        world.fault(f"{name}: {client.after_end} came after its end")
    if len(client.ends) > 1 or (not client.ends and not client.left):
        world.fault(f"{name}: ends are {client.ends}")
    if client.usage is not None:
        counted = client.usage["completion_tokens"]
        # A cancel that had to wait for the first token counts it, though nobody gets it (R10.8).
        held_back = world.schedule.decode and client.ends == [CANCELLED] and not client.tokens_before_stop
        as_delivered = counted == len(client.tokens) or (held_back and counted <= record.sent)
        if not as_delivered or client.usage["total_tokens"] != counted + client.usage["prompt_tokens"]:
            world.fault(f"{name}: usage {client.usage}, and {len(client.tokens)} tokens were delivered")
    for end in client.ends:
        _check_kind(world, client, end, name)
    if record.sent < len(client.tokens):
        world.fault(f"{name}: more tokens than the engine has sent")
    if client.context.first_tokens != (world.schedule.decode and bool(client.tokens)) and not (
        world.schedule.decode and client.context.first_tokens == 1 and record.sent
    ):
        world.fault(f"{name}: told of {client.context.first_tokens} first tokens")
    _check_time(world, client, name)


def _check_kind(world: World, client: Client, end: str, name: str) -> None:
    """Whether something that happened explains the end."""
    plan, record = client.plan, world.engine.records[client.plan.number]
    stopping = world.stopped_at is not None and client.ended_at is not None and client.ended_at >= world.stopped_at
    if end in SUCCESS:
        if not record.finished or plan.ending is not Ending.FINISH or client.tokens != plan.tokens:
            world.fault(
                f"{name}: a success with {len(client.tokens)} of {len(plan.tokens)} tokens, {plan.ending.value}"
            )
    elif end == CANCELLED:
        if client.stopped_at is None and plan.ending is not Ending.ABORTED and not stopping:
            world.fault(f"{name}: cancelled, and nobody had asked")
    elif end == "InvalidArgument" and not plan.adapter:
        world.fault(f"{name}: {end}, which blames the client")
    elif (
        plan.ending in (Ending.FINISH, Ending.ABORTED, Ending.NEVER)
        and not stopping
        and not _may_have_failed(world.engine, record, plan)
    ):
        world.fault(f"{name}: {end}, and nothing has happened that costs a request")


def _may_have_failed(engine: SimEngine, record: Record, plan: ClientPlan) -> bool:
    """Whether a fault has met this request: on its way to the engine, on the connection that it took, or itself."""
    if not record.calls:
        if plan.adapter:
            return True  # it may not be published
        quick = engine.schedule.keepalive or engine.schedule.hang_secs == QUICK_HANG_SECS
        harmless = HARMLESS - {FaultKind.SLOW, FaultKind.FROZEN} if quick else HARMLESS
        return not engine.touched <= harmless
    return record.dropped or any(link in engine.broken for link in record.links)


def _check_time(world: World, client: Client, name: str) -> None:
    """A client that stops, or gives up, has its end at once."""
    if client.ended_at is None or client.started_at is None:
        return
    plan = client.plan
    if world.schedule.decode and not client.tokens_before_stop:
        return
    limit = client.started_at + plan.patience_secs
    if plan.act in (Act.CANCEL, Act.VANISH, Act.CLOSE) and client.stopped_at is not None:
        limit = min(limit, client.stopped_at)
    limit += 2 * plan.pause_secs + PROMPT_SECS
    if client.ended_at > limit:
        world.fault(f"{name}: ended {client.ended_at - limit:.3f} s too late")
