"""The two engines of the tests, what they say, and how to see what they are working on."""

from __future__ import annotations

import contextlib
import enum
import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import grpc
from tokenizers import Tokenizer

from support import peers, tiny_model
from support.openai import CHATTY
from trio_sidecar import wire
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ENOUGH_TOKENS = 400
REFERENCE_SECONDS = 30


class EngineKind(enum.Enum):
    """Which gRPC server runs."""

    MOCK = "mock-server"
    VLLM_RS = "vllm-rs"


@attrs.frozen(slots=True)
class Reply:
    """What an engine says to one prompt with one seed.

    Attributes:
        ids: More than a test needs, as if it ignored the end of the sequence.
        size: How many of them come before the end of the sequence.
    """

    ids: tuple[int, ...]
    size: int
    decode: Callable[[list[int]], str]

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens."""
        return list(self.ids[:count])

    def text(self, count: int) -> str:
        """The text of the first ``count`` tokens."""
        return self.decode(self.tokens(count))


@attrs.frozen(slots=True, kw_only=True)
class Backend:
    """A running engine.

    Attributes:
        model: Its served name.
        prompt: Some prompt.
        eos: Its end-of-sequence token.
    """

    kind: EngineKind
    engine: peers.Engine
    model: str
    context_length: int
    prompt: list[int]
    chat_prompt: list[int]
    eos: int
    tokenizer: Tokenizer
    _reference: peers.Engine | None = None
    _replies: dict[tuple[tuple[int, ...], int], Reply] = attrs.field(factory=dict)
    _script: tuple[int, ...] = ()
    _again: Callable[[], peers.Engine] | None = None

    def restarted(self) -> Backend:
        """The same with another engine process, on the same address; what is left of the old one is ended first."""
        assert self._again is not None
        self.engine.close()
        return attrs.evolve(self, engine=self._again())

    def reply_to(self, prompt: Sequence[int], *, seed: int = 0) -> Reply:
        """What it says, with any temperature above zero, learned without the worker or the front end."""
        key = (tuple(prompt), seed)
        if key not in self._replies:
            self._replies[key] = self._scripted(seed) if self._script else self._asked(prompt, seed)
        return self._replies[key]

    @property
    def reply(self) -> Reply:
        """What it says to :attr:`prompt` without a seed."""
        return self.reply_to(self.prompt)

    @property
    def chat_reply(self) -> Reply:
        """What it says to :data:`CHATTY` as a chat."""
        return self.reply_to(self.chat_prompt)

    def dropped_at(self, request: str) -> float | None:
        """When the engine dropped an unfinished request, in seconds of the wall clock; None if it has not."""
        if self.engine.core is not None:
            found = re.search(rf"^ABORT at=(\S+) .*{re.escape(request)}", self.engine.core.log, re.MULTILINE)
            return float(found[1]) if found else None
        for event in self._events("mock_request_ended"):
            if event["request_id"] == request and event["reason"] in {"dropped", "aborted"}:
                return datetime.fromisoformat(event["timestamp"]).timestamp()
        return None

    def open_requests(self) -> int:
        """How many requests the engine is working on."""
        if self.engine.core is not None:
            return int(re.findall(r"active=(\d+)", self.engine.core.log)[-1])
        return next((int(event["open"]) for event in reversed(self._events("mock_request_"))), 0)

    def _events(self, prefix: str) -> list[dict[str, Any]]:
        """The mock server's log events with names like that."""
        wanted = f'"event": "{prefix}'
        return [json.loads(line) for line in self.engine.process.log.splitlines() if wanted in line]

    def _scripted(self, seed: int) -> Reply:
        """The mock core's reply goes round, and starts at the seed."""
        size = len(self._script)
        ids = tuple(self._script[(seed + position) % size] for position in range(ENOUGH_TOKENS))
        return Reply(ids, size - seed % size, self.tokenizer.decode)

    def _asked(self, prompt: Sequence[int], seed: int) -> Reply:
        """Ask over gRPC, with a client that is not ours."""
        endless = self._generate(prompt, seed, ignore_eos=True)
        ended = self._generate(prompt, seed, ignore_eos=False)
        assert [*endless[: len(ended) - 1], self.eos] == ended
        return Reply(tuple(endless), len(ended) - 1, self.tokenizer.decode)

    def _generate(self, prompt: Sequence[int], seed: int, *, ignore_eos: bool) -> list[int]:
        request = wire.GenerateRequest(
            model=self.model,
            token_ids=wire.TokenIds(ids=list(prompt)),
            temperature=0.5 if seed else None,
            sampling=wire.RandomSampling(seed=seed) if seed else None,
            stopping=wire.StoppingCriteria(max_new_tokens=ENOUGH_TOKENS, ignore_eos=ignore_eos),
            response=wire.ResponseOptions(output_token_ids=True),
        )
        assert self._reference is not None
        with grpc.insecure_channel(self._reference.endpoint) as channel:
            call = channel.unary_unary(
                methods.GENERATE.path, request_serializer=bytes, response_deserializer=wire.GenerateResponse.parse
            )
            response = call(request, timeout=REFERENCE_SECONDS)
        return list(response.outputs.token_ids)


@contextlib.contextmanager
def vllm_backend(
    directory: Path, *, tokens_per_second: float, context_length: int = 1024, text: str = tiny_model.REPLY
) -> Iterator[Backend]:
    """The real ``vllm-rs`` server over the mock core, which says the text."""
    tokenizer = tiny_model.make_model_directory(directory / "model", context_length=context_length)
    ids = tokenizer.encode(text).ids
    with _lives(
        lambda port, logs: peers.start_vllm_rs(
            directory / "model", "tiny", ids, log_dir=logs, tokens_per_second=tokens_per_second, port=port
        ),
        directory,
    ) as (engine, again):
        yield Backend(
            kind=EngineKind.VLLM_RS,
            engine=engine,
            model="tiny",
            context_length=context_length,
            prompt=tokenizer.encode(CHATTY).ids,
            chat_prompt=tokenizer.encode(f"<|user|>{CHATTY}<|end|><|assistant|>").ids,
            eos=tiny_model.EOS,
            tokenizer=tokenizer,
            script=tuple(ids),
            again=again,
        )


@contextlib.contextmanager
def mock_backend(
    directory: Path, *, tokens_per_second: float, context_length: int = 1024, seed: int = 42
) -> Iterator[Backend]:
    """Our mock server with the model that ships with it."""
    flags: dict[str, object] = {
        "--served-model-name": "mock",
        "--ttft-ms": 1000 / tokens_per_second,
        "--itl-ms": 1000 / tokens_per_second,
        "--max-model-len": context_length,
        "--seed": seed,
    }
    with contextlib.ExitStack() as cleanup:
        engine, again = cleanup.enter_context(
            _lives(lambda port, logs: peers.start_mock_server(flags, log_dir=logs, port=port), directory)
        )
        # The same seed without a pace, to learn the replies from.
        instant = flags | {"--ttft-ms": 0, "--itl-ms": 0}
        reference = peers.start_mock_server(instant, log_dir=directory / "reference")
        cleanup.callback(reference.close)
        model = Path(peers.ask_model(engine).model_id)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        eos: int = json.loads((model / "config.json").read_text())["eos_token_id"]
        chat = f"<|begin|><|user|>\n{CHATTY}<|end|>\n<|assistant|>\n"
        yield Backend(
            kind=EngineKind.MOCK,
            engine=engine,
            model="mock",
            context_length=context_length,
            prompt=tokenizer.encode(CHATTY, add_special_tokens=False).ids,
            chat_prompt=tokenizer.encode(chat, add_special_tokens=False).ids,
            eos=eos,
            tokenizer=tokenizer,
            reference=reference,
            again=again,
        )


@contextlib.contextmanager
def _lives(
    start: Callable[[int, Path], peers.Engine], directory: Path
) -> Iterator[tuple[peers.Engine, Callable[[], peers.Engine]]]:
    """An engine, and a way to start it again on the same port, each time with logs of its own."""
    engines = [start(0, directory / "logs")]

    def again() -> peers.Engine:
        engines.append(start(engines[0].port, directory / f"logs-{len(engines)}"))
        return engines[-1]

    try:
        yield engines[0], again
    finally:
        for engine in engines:
            engine.close()
