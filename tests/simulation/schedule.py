"""What happens in one run of the simulation, all of it derived from a seed."""

from __future__ import annotations

import enum
import random

import attrs

__all__ = ["Act", "ClientPlan", "Ending", "Fault", "FaultKind", "Schedule", "Update", "make_schedule"]

ADAPTERS = ("a", "b", "c")
QUICK_HANG_SECS = 0.7
UPDATES = ("load_lora", "load_lora", "unload_lora", "list_loras")


class Ending(enum.Enum):
    """How the engine ends its answer to one request."""

    FINISH = "finish"
    ABORTED = "aborted"
    """A terminal that says so."""

    ERROR = "error"
    """A gRPC status in the trailers."""

    NO_TERMINAL = "no terminal"
    """OK, though no terminal was sent."""

    LIE = "lie"
    """A terminal whose count of tokens is wrong."""

    NEVER = "never"
    REFUSE = "refuse"
    """A gRPC status instead of an answer."""


class Act(enum.Enum):
    """What a client does before its answer has ended."""

    READ = "read"
    CANCEL = "cancel"
    """Cancels, and reads on to the end."""

    VANISH = "vanish"
    """Cancels, and never looks again; this is what Dynamo does."""

    CLOSE = "close"
    """Drops its side without a word."""


class FaultKind(enum.Enum):
    """What breaks."""

    REFUSE = "connections are refused"
    SILENCE = "attempts to connect get no answer"
    HALF_OPEN = "one connection carries nothing any more"
    RESET = "one connection is reset, perhaps within a frame"
    CLOSE = "one connection is closed by the engine"
    GOAWAY = "one connection gets a graceful GOAWAY"
    GOAWAY_TWICE = "one connection gets a graceful GOAWAY, and then one with a last stream"
    GOAWAY_HARD = "one connection gets a GOAWAY with an error, and its newest calls are dropped"
    SLOW = "every packet takes longer"
    FROZEN = "the engine does nothing, but the kernel still accepts"
    KILLED = "the engine dies and comes back as another life"
    UNHEALTHY = "the engine says that it does not serve"
    HUNG = "the engine makes no tokens, and says that it serves"
    RESTRICTED = "one connection gets a lower limit of streams"
    STREAM_RESET = "the engine resets one stream"


@attrs.frozen(slots=True, kw_only=True)
class ClientPlan:
    """One request.

    Attributes:
        number: From 1; its tokens are counted from a thousand times that.
        at: When it comes, in seconds from the start of the worker.
        accept_secs: How long the engine takes to accept it.
        steps: For each message of the engine: seconds before it, and how many tokens it has.
        ending: What comes after them.
        act: What the client does.
        act_secs: When, from its start on.
        pause_secs: How long it takes over each chunk.
        patience_secs: When it gives up and cancels; like a front end's own limit.
        prompt_tokens: Length of its prompt.
        text_bytes: What each message of the engine carries beside its tokens.
        adapter: The LoRA adapter that it asks for; empty for the base model.
    """

    number: int
    at: float
    accept_secs: float
    steps: tuple[tuple[float, int], ...]
    ending: Ending
    act: Act
    act_secs: float
    pause_secs: float
    patience_secs: float
    prompt_tokens: int
    text_bytes: int
    adapter: str

    @property
    def tokens(self) -> list[int]:
        """All tokens of a whole answer."""
        first = 1000 * self.number
        return list(range(first, first + sum(count for _, count in self.steps)))


@attrs.frozen(slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: What breaks.
        at: When, in seconds from the start.
        secs: How long it lasts, where it lasts.
        where: Which connection, as a fraction of all that are open.
        extra: A number for what else is to be chosen, from 0 to 1.
    """

    kind: FaultKind
    at: float
    secs: float
    where: float
    extra: float


@attrs.frozen(slots=True, kw_only=True)
class Update:
    """One operation on adapters: which, on which, and when it comes."""

    name: str
    adapter: str
    at: float


@attrs.frozen(slots=True, kw_only=True)
class Schedule:
    """One run.

    Attributes:
        decode: Whether the worker is a decode worker, which holds cancels back until the first token.
        connections: Size of the pool.
        coalesce: Whether chunks are merged.
        max_streams: What the engine announces on each connection.
        grace_secs: Dynamo's wait between withdrawal and cleanup.
        drain_secs: The drain budget.
        stop_at: When SIGTERM comes, in seconds from the start.
        stop_again_secs: When another one follows; negative for never.
        engine_at: When the engine begins to listen.
        serves_secs: How much later it says that it serves.
        lora: Whether adapters are managed.
        keepalive: Whether silent connections are found soon, instead of after the default half minute.
        hang_secs: When a silent engine is asked for one token.
        packet_secs: The longest time that a packet takes.
        cut_probability: How often only a part of what was sent arrives at once.
    """

    seed: int
    decode: bool
    connections: int
    coalesce: bool
    max_streams: int
    grace_secs: float
    drain_secs: float
    stop_at: float
    stop_again_secs: float
    engine_at: float
    serves_secs: float
    lora: bool
    keepalive: bool
    hang_secs: float
    packet_secs: float
    cut_probability: float
    clients: tuple[ClientPlan, ...]
    faults: tuple[Fault, ...]
    updates: tuple[Update, ...]

    def __str__(self) -> str:
        """Everything, one thing a line."""
        head = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in attrs.fields(Schedule)
            if field.name not in ("clients", "faults", "updates")
        )
        rest = [f"  {part}" for part in (*self.clients, *self.faults, *self.updates)]
        return "\n".join((head, *rest))


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(f"schedule {seed}")
    calm = chance.random() < 0.15
    lora = chance.random() < 0.15
    clients = tuple(_client(chance, number, lora=lora) for number in range(1, 2 + chance.choice((1, 2, 3, 4, 6, 8))))
    faults = () if calm else tuple(_fault(chance, clients) for _ in range(chance.choice((1, 1, 2, 2, 3, 4))))
    early = chance.random() < 0.1
    slow_start = chance.random() < 0.15
    long = chance.random() < 0.2  # enough for a recovery
    return Schedule(
        seed=seed,
        decode=chance.random() < 0.2,
        connections=chance.choice((1, 1, 2, 2, 3)),
        coalesce=chance.random() < 0.7,
        max_streams=chance.choice((1, 2, 3, 8, 100)),
        grace_secs=chance.choice((0.0, 0.05, 0.5)),
        drain_secs=chance.choice((0.1, 1.0, 5.0)),
        stop_at=chance.uniform(0.0, 0.05) if early else chance.uniform(0.3, 16.0 if long else 6.0),
        stop_again_secs=chance.uniform(0.0, 3.0) if chance.random() < 0.2 else -1.0,
        engine_at=chance.uniform(0.0, 3.0) if slow_start else 0.0,
        serves_secs=chance.uniform(0.0, 2.0) if slow_start else 0.0,
        lora=lora,
        keepalive=chance.random() < 0.3,
        hang_secs=QUICK_HANG_SECS if chance.random() < 0.3 else 60.0,
        packet_secs=chance.choice((0.001, 0.001, 0.02)),
        cut_probability=chance.choice((0.0, 0.1, 0.6)),
        clients=clients,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        updates=_updates(chance) if lora else (),
    )


def _updates(chance: random.Random) -> tuple[Update, ...]:
    first = Update(name="load_lora", adapter="a", at=0.02)
    return (first, *(_update(chance) for _ in range(chance.randrange(6))))


def _update(chance: random.Random) -> Update:
    return Update(
        name=chance.choice(UPDATES),
        adapter=chance.choice(ADAPTERS),
        at=chance.choice((0.02, chance.uniform(0.02, 0.2), chance.uniform(0.1, 3.0))),
    )


def _client(chance: random.Random, number: int, *, lora: bool) -> ClientPlan:
    endings = list(Ending)
    weights = (14, 1, 1, 1, 1, 1, 1)
    gap = chance.choice((0.0, 0.001, 0.02, 0.2))
    messages = chance.randrange(9)
    if chance.random() < 0.03:
        gap, messages = 0.0, 150  # more than buffers take
    steps = tuple((chance.uniform(0.0, gap) if gap else 0.0, chance.choice((1, 1, 1, 2, 5))) for _ in range(messages))
    return ClientPlan(
        number=number,
        at=chance.choice((0.1, chance.uniform(0.05, 1.0), chance.uniform(0.1, 4.0))),
        accept_secs=chance.choice((0.0, 0.0, 0.0, chance.uniform(0.0, 1.0))),
        steps=steps,
        ending=chance.choices(endings, weights)[0],
        act=chance.choices(list(Act), (6, 2, 2, 1))[0],
        act_secs=chance.choice((0.0, chance.uniform(0.0, 0.01), chance.uniform(0.0, 0.5))),
        pause_secs=chance.choice((0.0, 0.0, 0.0, chance.uniform(0.0, 0.3))),
        patience_secs=chance.uniform(1.0, 4.0),
        prompt_tokens=3 if chance.random() < 0.97 else chance.choice((5_000, 60_000)),
        text_bytes=0 if chance.random() < 0.96 else chance.choice((10_000, 150_000)),
        adapter=chance.choice(("a", "a", *ADAPTERS)) if lora and chance.random() < 0.6 else "",
    )


def _fault(chance: random.Random, clients: tuple[ClientPlan, ...]) -> Fault:
    during = chance.choice(clients)
    secs = during.accept_secs + sum(pause for pause, _ in during.steps)
    return Fault(
        kind=chance.choice(list(FaultKind)),
        at=chance.choice(
            (
                chance.uniform(0.0, 0.12),
                chance.uniform(0.1, 4.0),
                during.at + chance.uniform(0.0, 0.02),
                during.at + chance.uniform(0.0, secs + 0.02),
                during.at + chance.uniform(0.0, secs + 0.02),
            )
        ),
        secs=chance.choice((chance.uniform(0.0, 0.1), chance.uniform(0.1, 3.0))),
        where=chance.random(),
        extra=chance.random(),
    )
