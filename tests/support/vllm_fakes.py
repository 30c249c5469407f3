"""Stand-ins for vLLM's objects, with the attributes that the engine reads and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.engines.vllm_facts import VllmFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_sidecar.engines.sampling import VllmJob
    from trio_sidecar.wire import LoraAdapter

Column = tuple[int, float, int]
"""Token id, logprob, rank."""


def facts(**changes: Any) -> VllmFacts:
    """An engine with a small vocabulary and two ranks."""
    plain: dict[str, Any] = {
        "model_id": "/models/tiny",
        "served_names": ("tiny", "small"),
        "ranks": range(2),
        "max_model_len": 64,
        "vocab_size": 100,
        "tokenizer_size": 90,
        "max_logprobs": 20,
    }
    return VllmFacts(**(plain | changes))


@attrs.define
class Scores:
    """vLLM's ``FlatLogprobs``."""

    start_indices: list[int] = attrs.field(factory=list)
    end_indices: list[int] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    ranks: list[int | None] = attrs.field(factory=list)

    def __len__(self) -> int:
        """Positions, so that one without any is false, as vLLM's is."""
        return len(self.start_indices)

    @classmethod
    def of(cls, positions: Iterable[Sequence[Column]]) -> Scores:
        """Scores of positions; the first column of each is the token itself."""
        scores = cls()
        for columns in positions:
            scores.start_indices.append(len(scores.token_ids))
            for token, logprob, rank in columns:
                scores.token_ids.append(token)
                scores.logprobs.append(logprob)
                scores.ranks.append(rank)
            scores.end_indices.append(len(scores.token_ids))
        return scores


@attrs.define(kw_only=True)
class Completion:
    """vLLM's ``CompletionOutput``."""

    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: Scores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sampling_mask: Any = None


@attrs.define(kw_only=True)
class Output:
    """vLLM's ``RequestOutput``."""

    outputs: list[Completion]
    prompt_logprobs: Scores | None = None
    num_cached_tokens: int | None = 0
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


def output(text: str = "", tokens: Sequence[int] = (), *, prompt_logprobs: Scores | None = None, **rest: Any) -> Output:
    """One output; rest goes to its completion."""
    return Output(
        outputs=[Completion(text=text, token_ids=list(tokens), **rest)],
        prompt_logprobs=prompt_logprobs,
    )


class EngineDeadError(Exception):
    """Named as vLLM's."""


class VLLMClientError(Exception):
    """Named as vLLM's."""


class RetryableRequestError(Exception):
    """Named as vLLM's."""


class Collector:
    """vLLM's ``RequestOutputCollector``."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output: Any = None

    def put(self, output: Any) -> None:
        """What vLLM calls; the engine replaces it."""
        self.output = output


class Tokenizer:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        """Ids below 90."""
        return [ord(character) % 90 for character in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """A letter per token; 0 is special."""
        return "".join(chr(97 + token % 26) for token in ids if token or not skip_special_tokens)


class FakeLlm:
    """vLLM's ``AsyncLLM``.

    Attributes:
        errored: Whether it is dead.
        collectors: By internal request id, those that are in the engine.
        aborted: Internal ids, in order.
        refusal: Raised by ``add_request``.
        early: Put into the collector before ``add_request`` returns.
        traces: Whether it traces.
    """

    def __init__(self) -> None:
        self.errored = False
        self.collectors: dict[str, Collector] = {}
        self.arguments: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.early: Any = None
        self.traces = False

    def get_tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return Tokenizer()

    async def is_tracing_enabled(self) -> bool:
        """Whether it traces."""
        return self.traces

    async def add_request(self, request_id: str, **rest: Any) -> Collector:
        """Take a request in."""
        if self.refusal is not None:
            raise self.refusal
        self.arguments.append({"request_id": request_id, **rest})
        collector = Collector(f"{request_id}-{len(self.arguments)}")
        self.collectors[collector.request_id] = collector
        if self.early is not None:
            collector.put(self.early)
        return collector

    async def abort(self, request_id: str, *, internal: bool = False) -> None:
        """Let a request go."""
        assert internal
        self.aborted.append(request_id)
        self.collectors.pop(request_id, None)

    @property
    def only(self) -> Collector:
        """The one collector."""
        (collector,) = self.collectors.values()
        return collector


class FakeRequests:
    """How a job would be put to vLLM."""

    def arguments(self, job: VllmJob) -> dict[str, Any]:
        """Its id and parameters."""
        return {"request_id": job.request_id, "params": job.params, "prompt": job.prompt}

    def lora(self, adapter: LoraAdapter) -> Any:
        """The adapter itself."""
        return adapter

    def weight_init(self, info: dict[str, Any]) -> Any:
        """The info itself."""
        return info

    def weight_update(self, info: dict[str, Any]) -> Any:
        """The info itself."""
        return info
