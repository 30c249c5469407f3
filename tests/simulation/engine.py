"""The engine of the simulation: what it answers, and what it knows about every request."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs

from simulation.adapters import MAX_LORAS, EngineAdapters
from simulation.schedule import Ending, Fault, FaultKind
from trio_sidecar import wire
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.testing.memory_peer import MemoryConnection
from trio_sidecar.testing.network import Answer
from trio_sidecar.wire import methods
from trio_sidecar.wire.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.schedule import ClientPlan, Schedule
    from trio_sidecar.testing.memory_peer import MemoryCall
    from trio_sidecar.testing.network import Link, Network

HOST, PORT = "engine", 50051
MODEL = "served-model"
Status = wire.HealthCheckResponseServingStatus
NOT_FOUND, INTERNAL, UNAVAILABLE, UNIMPLEMENTED = 5, 13, 14, 12


PROBE = "trio-sidecar-probe-"

BREAKING = frozenset({FaultKind.HALF_OPEN, FaultKind.RESET, FaultKind.CLOSE, FaultKind.GOAWAY_HARD})
"""Faults after which no answer on the connection can be expected."""


@attrs.define(eq=False)
class Record:
    """What the engine did about one request.

    Attributes:
        calls: How often it came.
        sent: Tokens that were sent, over all calls.
        finished: A terminal was sent.
        links: The connections that it came over.
        dropped: The engine gave it up, by a reset or a GOAWAY.
    """

    calls: int = 0
    sent: int = 0
    finished: bool = False
    links: list[Link] = attrs.field(factory=list)
    dropped: bool = False


class SimEngine:
    """One address, and the lives of the engine behind it.

    Attributes:
        open: Generations under way, each with the plan that it follows.
        records: By the client's number.
        probes: Requests of one token, of no client.
        touched: Kinds of fault that happened.
        broken: Connections that were cut, closed or held without end.
    """

    def __init__(self, schedule: Schedule, network: Network, note: Callable[..., None]) -> None:
        self.schedule = schedule
        self.network = network
        self.note = note
        self.open: dict[MemoryCall, ClientPlan] = {}
        self.records = {client.number: Record() for client in schedule.clients}
        self.probes: set[MemoryCall] = set()
        self.touched: set[FaultKind] = set()
        self.broken: set[Link] = set()
        self.connections: list[MemoryConnection] = []
        self.life = 1
        self.serving = False
        self.frozen = False
        self.hung = False
        self.adapters = EngineAdapters()
        self._timers: list[Any] = []
        self._waiting: list[Callable[[], object]] = []
        self._plans = {client.number: client for client in schedule.clients}
        network.listen(HOST, PORT, self._accept)

    # -- Life

    def start(self) -> None:
        """Begin to listen, and then to serve."""
        schedule = self.schedule
        if schedule.engine_at:
            self.network.answer = Answer.REFUSE
            self.later(schedule.engine_at, self._listen)
        self.later(schedule.engine_at + schedule.serves_secs, self._serve)
        for fault in schedule.faults:
            self.later(fault.at, self.break_down, fault)

    def later(self, secs: float, function: Callable[..., object], *args: Any) -> None:
        """Call that after so many seconds."""
        self._timers.append(current_loop().call_later(secs, function, *args))

    def _listen(self) -> None:
        self.network.answer = Answer.ACCEPT

    def _serve(self) -> None:
        self.serving = True

    @property
    def kv_events(self) -> str:
        """Where this life publishes them."""
        return f"tcp://{HOST}:{6000 + self.life}"

    @property
    def links(self) -> list[Link]:
        """Connections that are open."""
        return [link for link in self.network.links if link.open]

    @property
    def well(self) -> bool:
        """Whether whoever connects is answered, and at once."""
        links = self.links
        return (
            self.network.answer is Answer.ACCEPT
            and self.serving
            and not self.frozen
            and not self.hung
            and not any(link.held or link.slow_secs for link in links)
        )

    def held_open(self) -> list[ClientPlan]:
        """Generations under way of which the other side could have told us if they were over."""
        return [
            plan
            for call, plan in self.open.items()
            if call.connection.wire is not None and not call.connection.wire.link.held
        ]

    # -- Faults

    def break_down(self, fault: Fault) -> None:
        """Let a fault happen."""
        self.touched.add(fault.kind)
        links = self.links
        if self.schedule.keepalive and fault.kind in (FaultKind.SLOW, FaultKind.FROZEN):
            self.broken.update(links)  # to be taken for dead
        link = links[int(fault.where * len(links))] if links else None
        self.note("fault", kind=fault.kind.name, links=len(links))
        match fault.kind:
            case FaultKind.REFUSE | FaultKind.SILENCE:
                self.network.answer = Answer.REFUSE if fault.kind is FaultKind.REFUSE else Answer.SILENCE
                self.later(fault.secs, self._listen)
            case FaultKind.SLOW:
                for each in links:
                    each.slow_secs = fault.extra
                    self.later(fault.secs, setattr, each, "slow_secs", 0.0)
            case FaultKind.FROZEN:
                self.frozen = True
                for each in links:
                    each.hold()
                self.later(fault.secs, self._thaw)
            case FaultKind.KILLED:
                self._die(fault)
            case FaultKind.UNHEALTHY:
                self.serving = False
                self.later(fault.secs, self._serve)
            case FaultKind.HUNG:
                self.hung = True
                self.later(fault.secs, self._go_on)
            case _:
                if link is not None:
                    self._break_link(fault, link)

    def _break_link(self, fault: Fault, link: Link) -> None:
        server: MemoryConnection = link.server.protocol
        newest = max(server.calls, default=0)
        if fault.kind in BREAKING:
            self.broken.add(link)
        match fault.kind:
            case FaultKind.HALF_OPEN:
                link.hold()
                self.later(fault.secs, link.reset)
            case FaultKind.RESET:
                link.reset()
            case FaultKind.CLOSE:
                server.close()
            case FaultKind.GOAWAY:
                server.go_away()
            case FaultKind.GOAWAY_TWICE:
                server.announce_end()
                self.later(fault.extra * 0.01, server.go_away)
            case FaultKind.GOAWAY_HARD:
                server.go_away(code=2, last_stream_id=max(0, newest - 2))
                self.later(fault.extra * 0.1, server.close)
            case FaultKind.RESTRICTED:
                server.limit_streams(1 + int(fault.extra * 3))
            case FaultKind.STREAM_RESET:
                calls = [call for call in server.calls.values() if call in self.open]
                if calls:
                    call = calls[int(fault.extra * len(calls))]
                    self.records[self.open.pop(call).number].dropped = True
                    call.reset(2 if fault.where < 0.5 else 7)

    def _thaw(self) -> None:
        self.frozen = False
        for link in self.links:
            link.go_on()

    def _go_on(self) -> None:
        self.hung = False
        waiting, self._waiting = self._waiting, []
        for function in waiting:
            function()

    def _unless_hung(self, function: Callable[..., object], *args: Any) -> None:
        """Call that now, or when the engine hangs no longer."""
        if self.hung:
            self._waiting.append(functools.partial(function, *args))
        else:
            function(*args)

    def _die(self, fault: Fault) -> None:
        """All connections break; the next life begins later."""
        self.life += 1
        self.hung = False
        self._waiting.clear()
        self.adapters = EngineAdapters()
        self.serving = False
        self.network.answer = Answer.REFUSE
        self.broken.update(self.links)
        for link in self.links:
            if fault.where < 0.5:
                link.reset()
            else:
                link.server.protocol.close()
        self.later(fault.secs, self._listen)
        self.later(fault.secs + fault.extra, self._serve)

    def end_of_faults(self) -> None:
        """Let everything through that still waits somewhere, and do nothing more."""
        for timer in self._timers:
            timer.cancel()
        self.frozen = self.hung = False
        self._waiting.clear()
        self._listen()
        for link in self.network.links:
            link.slow_secs = 0.0
            link.go_on()

    # -- Calls

    def _accept(self) -> MemoryConnection:
        return MemoryConnection(self, max_concurrent_streams=self.schedule.max_streams)

    def connected(self, connection: MemoryConnection) -> None:
        """A frozen engine's kernel accepts connections, and no more."""
        self.connections.append(connection)
        if self.frozen and connection.wire is not None:
            connection.wire.link.hold()

    def called(self, call: MemoryCall) -> None:
        """Answer a request."""
        if call.path == methods.GENERATE_STREAM.path:
            self._generate(call)
            return
        answer = self._unary(call)
        if answer is None or isinstance(answer, int):
            call.refuse(answer or UNIMPLEMENTED, "refused")
            return
        call.send_headers()
        call.send_message(encode(answer))
        call.end()

    def _unary(self, call: MemoryCall) -> Any:
        match call.path:
            case methods.HEALTH_CHECK.path:
                return wire.HealthCheckResponse(status=Status.SERVING if self.serving else Status.NOT_SERVING)
            case methods.GET_MODEL_INFO.path:
                return wire.ModelInfo(
                    model_id="model-source",
                    served_model_name=MODEL,
                    supports_text_input=True,
                    supports_token_ids_input=True,
                    supports_lora=True,
                )
            case methods.GET_SERVER_INFO.path:
                return wire.ServerInfo(
                    api_version="vllm",
                    max_model_len=8192,
                    max_loras=MAX_LORAS,
                    instance_id=f"life-{self.life}",
                    kv_block_size=16,
                )
            case methods.GET_KV_EVENT_SOURCES.path:
                source = wire.KvEventSource(
                    transport="zmq",
                    endpoint=self.kv_events,
                    encoding="msgpack",
                    schema_version=1,
                    data_parallel_rank=0,
                )
                return wire.GetKvEventSourcesResponse(sources=[source])
        for method in (methods.LIST_LORAS, methods.LOAD_LORA, methods.UNLOAD_LORA):
            if call.path == method.path:
                return self.adapters.answer(decode(method.request, call.request))
        return None

    def gone(self, call: MemoryCall) -> None:
        """A call was reset by the client, or its connection is lost."""
        self.probes.discard(call)
        plan = self.open.pop(call, None)
        if plan is not None:
            self.note("engine_released", client=plan.number)

    # -- Generations

    def _generate(self, call: MemoryCall) -> None:
        request = decode(wire.GenerateRequest, call.request)
        assert request.token_ids is not None
        if request.request_id.startswith(PROBE):
            self.probes.add(call)
            self.note("engine_got_probe")
            self._unless_hung(self._answer_probe, call)
            return
        plan = self._plans[request.token_ids.ids[0]]
        record = self.records[plan.number]
        record.calls += 1
        assert call.connection.wire is not None
        record.links.append(call.connection.wire.link)
        if request.lora_name and request.lora_name not in self.adapters.held:
            record.dropped = True
            call.refuse(NOT_FOUND, "no such adapter")
            return
        self.open[call] = plan
        self.note("engine_got", client=plan.number, call=record.calls)
        self.later(plan.accept_secs, self._begin, call, plan)

    def _answer_probe(self, call: MemoryCall) -> None:
        if call in self.probes:
            self.probes.discard(call)
            call.send_headers()
            call.send_message(encode(wire.GenerateResponse(outputs=wire.SequenceOutput(num_tokens=1, token_ids=[7]))))
            call.end()

    def _begin(self, call: MemoryCall, plan: ClientPlan) -> None:
        self._unless_hung(self._begin_now, call, plan)

    def _begin_now(self, call: MemoryCall, plan: ClientPlan) -> None:
        if call not in self.open:
            return
        if plan.ending is Ending.REFUSE:
            del self.open[call]
            call.refuse(INTERNAL, "refused")
            return
        call.send_headers()
        self._next(call, plan, 0, 0)

    def _next(self, call: MemoryCall, plan: ClientPlan, index: int, sent: int) -> None:
        """Send messages up to the next pause."""
        while index < len(plan.steps):
            pause, _ = plan.steps[index]
            if pause:
                self.later(pause, self._step, call, plan, index, sent)
                return
            sent = self._send(call, plan, index, sent)
            index += 1
        self._end(call, plan, sent)

    def _step(self, call: MemoryCall, plan: ClientPlan, index: int, sent: int) -> None:
        self._unless_hung(self._step_now, call, plan, index, sent)

    def _step_now(self, call: MemoryCall, plan: ClientPlan, index: int, sent: int) -> None:
        if call in self.open:
            sent = self._send(call, plan, index, sent)
            self._next(call, plan, index + 1, sent)

    def _send(self, call: MemoryCall, plan: ClientPlan, index: int, sent: int) -> int:
        _, count = plan.steps[index]
        ids = plan.tokens[sent : sent + count]
        output = wire.SequenceOutput(text="x" * (count + plan.text_bytes), num_tokens=count, token_ids=ids)
        call.send_message(encode(wire.GenerateResponse(outputs=output)))
        self.records[plan.number].sent += count
        return sent + count

    def _end(self, call: MemoryCall, plan: ClientPlan, sent: int) -> None:
        if plan.ending is Ending.NEVER:
            return
        del self.open[call]
        if plan.ending is Ending.ERROR:
            call.end(UNAVAILABLE if plan.number % 2 else INTERNAL, "scripted")
            return
        if plan.ending is not Ending.NO_TERMINAL:
            reasons = wire.FinishInfoFinishReason
            finish = wire.FinishInfo(
                num_output_tokens=sent + (plan.ending is Ending.LIE),
                finish_reason=reasons.ABORTED if plan.ending is Ending.ABORTED else reasons.LENGTH,
            )
            call.send_message(encode(wire.GenerateResponse(outputs=wire.SequenceOutput(finish_info=finish))))
            self.records[plan.number].finished = True
        call.end()
