"""One generation of vLLM: the async context manager and the stream in one (asyncio-flavoured).

``AsyncLLM.add_request`` is used rather than ``AsyncLLM.generate``, because the former checks and submits before it
returns, and an async generator that is left early would free its request only when it is collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import structlog

from trio_sidecar.bridge import AioSignal, aio_in_thread, aio_shielded
from trio_sidecar.engines.sampling import build_job, open_request
from trio_sidecar.engines.vllm_binding import status_of
from trio_sidecar.engines.vllm_output import OutputConverter
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.tracing import passed_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from trio_sidecar.engines.sampling import VllmJob
    from trio_sidecar.engines.vllm_binding import Requests
    from trio_sidecar.engines.vllm_facts import VllmFacts
    from trio_sidecar.engines.vllm_lora import LoraRegistry
    from trio_sidecar.wire import GenerateRequest, GenerateResponse

__all__ = ["Outbox", "StreamTarget", "VllmStream"]

ABORT_SECS = 5.0
"""How long telling the engine to let go of a request may take."""

SUBMIT_SECS = 30.0
"""How long a submission that has begun may go on after its caller was cancelled."""

MANY_OUTPUTS = 32
"""How many outputs of vLLM may queue up before they are converted, and so merged, early: objects, not tokens, are what
a reader that does not read would cost."""

LONG_TEXT = 4096
"""Prompts with more characters are tokenised in a thread, so that they do not hold up everyone's tokens."""

log = structlog.get_logger("trio_sidecar.engines.vllm")


class StreamTarget(Protocol):
    """What a stream needs of its engine."""

    @property
    def facts(self) -> VllmFacts:
        """What it is."""
        ...

    @property
    def llm(self) -> Any:
        """The ``AsyncLLM`` that runs now; raises RpcError INTERNAL if it has died."""
        ...

    @property
    def requests(self) -> Requests:
        """Makes vLLM's own objects."""
        ...

    @property
    def loras(self) -> LoraRegistry:
        """The adapters."""
        ...

    def admit(self, stream: VllmStream, request_id: str) -> None:
        """Take note of a stream; raises RpcError where its id must be unique and is not."""
        ...

    def release(self, stream: VllmStream) -> None:
        """Forget a stream."""
        ...

    def died(self) -> None:
        """The engine was found dead."""
        ...


class Outbox:
    """Where vLLM puts the outputs of one request, and where its reader takes them.

    It stands in for the ``put`` of vLLM's own collector, which would merge outputs in a way that loses candidates.
    """

    def __init__(self, converter: OutputConverter) -> None:
        self._converter = converter
        self._outputs: list[Any] = []
        self._answers: list[GenerateResponse] = []
        self._failure: RpcError | None = None
        self._signal = AioSignal()
        self.engine_dead = False

    def attach(self, collector: Any) -> None:
        """Take over from a collector; what it has already comes first."""
        early = collector.output
        collector.output = None
        if early is not None:
            self.put(early)
        collector.put = self.put

    def put(self, output: Any) -> None:
        """Take an output, or the exception that ends the request; called by vLLM, so it must not raise."""
        if isinstance(output, Exception):
            self.fail(output)
        elif self._failure is None:
            self._outputs.append(output)
            if len(self._outputs) >= MANY_OUTPUTS:
                self._convert()
        self._signal.call()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has arrived."""
        if self._failure is None:
            self._convert()
        if self._failure is None:
            self._failure = status_of(error)
            self.engine_dead = "EngineDeadError" in {cls.__name__ for cls in type(error).__mro__}
            if not self.engine_dead:
                # An engine that refuses a request it was given counts as one that has looked at the prompt.
                self._answers += self._converter.prompt_info()
        self._signal.call()

    async def aio_take(self) -> list[GenerateResponse]:
        """Wait for answers and take all.

        Raises:
            RpcError: The request ended with an error, and all answers before it were taken.
        """
        while True:
            self._convert()
            if self._answers:
                answers, self._answers = self._answers, []
                return answers
            if self._failure is not None:
                raise self._failure
            await self._signal.aio_wait()

    def _convert(self) -> None:
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        try:
            fresh = self._converter.convert(outputs)
        except RpcError as error:
            self._failure = error
        except Exception as error:
            # vLLM's output loop, which may be the caller, serves everybody.
            log.exception("vllm_output_failed")
            self._failure = RpcError(StatusCode.INTERNAL, f"the engine's output cannot be read: {error}")
        else:
            self._answers = _joined(self._answers, fresh)


class VllmStream:
    """See :class:`~trio_sidecar.engines.contract.EngineStream`."""

    def __init__(self, engine: StreamTarget, request: GenerateRequest, metadata: Mapping[str, str]) -> None:
        self._engine = engine
        self._request = request
        self._metadata = metadata
        self._outbox: Outbox | None = None
        self._converter: OutputConverter | None = None
        self._internal_id: str | None = None
        self._llm: Any = None
        self._finished = False

    async def __aenter__(self) -> Self:
        """Check and submit the request; raises RpcError if it is refused."""
        engine = self._engine
        llm = engine.llm
        opened = open_request(self._request, self._metadata, engine.facts, engine.loras.find)
        job = build_job(opened, await self._aio_prompt(llm), engine.facts)
        engine.admit(self, job.request_id)
        try:
            # Not cut in the middle: vLLM would keep a request that nobody knows the id of.
            await aio_shielded(SUBMIT_SECS, self._aio_submit, llm, job)
        except BaseException as error:
            await self._aio_let_go()  # noqa: ASYNC102 - asyncio, shielded inside
            if isinstance(error, Exception):
                refusal = status_of(error)
                if refusal.status is StatusCode.INTERNAL:
                    log.error("vllm_submit_failed", reason=refusal.detail, exc_info=error)
                raise refusal from error  # noqa: ASYNC104 - no cancel, but an Exception
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the request in the engine, unless it has ended."""
        await self._aio_let_go()  # noqa: ASYNC102 - asyncio, shielded inside

    async def aio_receive(self) -> Sequence[GenerateResponse]:
        """Wait for answers, then take all that have arrived; see the contract."""
        if self._finished:
            return ()
        if self._outbox is None or self._converter is None:
            reason = "the stream was not entered"
            raise RuntimeError(reason)
        try:
            answers = await self._outbox.aio_take()
        except RpcError:
            self._finished = True
            if self._outbox.engine_dead:
                self._engine.died()
            raise
        last = answers[-1].outputs
        self._finished = last is not None and last.finish_info is not None
        return answers

    def fail(self, error: Exception) -> None:
        """End with an error (for the engine only)."""
        if self._outbox is not None:
            self._outbox.fail(error)

    async def _aio_prompt(self, llm: Any) -> Sequence[int]:
        request = self._request
        if request.text is None:
            return request.token_ids.ids if request.token_ids is not None else ()
        try:
            # An empty text, too: a tokenizer may put a token before every text.
            encode: Callable[[str], list[int]] = llm.get_tokenizer().encode
            if len(request.text) > LONG_TEXT:
                return await aio_in_thread(encode, request.text)
            return encode(request.text)
        except Exception as error:
            raise RpcError(StatusCode.INTERNAL, f"the tokenizer failed: {error}") from error

    async def _aio_submit(self, llm: Any, job: VllmJob) -> None:
        arguments = self._engine.requests.arguments(job)

        def decode(ids: list[int]) -> str:
            tokenizer = llm.get_tokenizer()
            skip = job.params["skip_special_tokens"]
            # vLLM's own text comes from the fast tokenizer inside, where there is one.
            return str(getattr(tokenizer, "_tokenizer", tokenizer).decode(ids, skip_special_tokens=skip))

        converter = OutputConverter(job, decode)
        outbox = Outbox(converter)
        trace = passed_on(self._metadata)
        if trace and await llm.is_tracing_enabled():  # otherwise vLLM warns that it does not trace
            arguments["trace_headers"] = trace
        collector = await llm.add_request(**arguments)
        # No await in between: what vLLM puts in from here on comes to us.
        self._llm, self._internal_id = llm, collector.request_id
        outbox.attach(collector)
        self._converter, self._outbox = converter, outbox

    async def _aio_let_go(self) -> None:
        """Free what the engine holds for the request, at once and whatever happens."""
        self._engine.release(self)
        converter, internal_id, self._internal_id = self._converter, self._internal_id, None
        if internal_id is None or converter is None or converter.finished:
            return
        try:
            await aio_shielded(ABORT_SECS, self._aio_abort, internal_id)
        except Exception as error:  # noqa: BLE001 - the engine has died, or hangs; its watcher sees to that
            log.warning("vllm_abort_failed", reason=str(error))

    async def _aio_abort(self, internal_id: str) -> None:
        await self._llm.abort(internal_id, internal=True)


def _joined(old: list[GenerateResponse], new: list[GenerateResponse]) -> list[GenerateResponse]:
    """Two lists of answers, the deltas at the seam merged into one."""
    if not old or old[-1].outputs is None or new[0].outputs is None:
        return old + new
    into, more = old[-1].outputs, new[0].outputs
    into.text += more.text
    into.num_tokens += more.num_tokens
    into.token_ids += more.token_ids
    into.logprobs += more.logprobs
    into.ranks += more.ranks
    into.candidate_tokens += more.candidate_tokens
    into.sampling_mask = more.sampling_mask
    into.finish_info = more.finish_info
    return old + new[1:]
