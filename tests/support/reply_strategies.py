"""Hypothesis strategies for what an engine answers: a sound stream for a request, with at most one flaw."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import grpc
from hypothesis import strategies as st

from support.recorder import Reply
from support.request_strategies import JSON_OBJECT, NUMBER, TEXT
from support.samples import candidates
from trio_sidecar import wire
from trio_sidecar.convert.struct import struct_from_json

if TYPE_CHECKING:
    from collections.abc import Callable

REASONS = wire.FinishInfoFinishReason
TOKEN = st.integers(0, 50)
RANK = st.integers(0, 2**32 - 1)
LOGPROB = st.one_of(
    st.floats(-100, 0, width=32), st.sampled_from([math.nan, math.inf, -math.inf, -9999.0, -9999.5, -1e30, 0.5])
)
CANDIDATES = st.lists(st.tuples(TOKEN, LOGPROB, RANK), max_size=3).map(lambda entries: candidates(*entries))
PAYLOAD = JSON_OBJECT.map(lambda value: struct_from_json(value, label="payload"))
STATUSES = st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])


def _columns(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """Logprobs, ranks and candidates of so many tokens."""
    return {
        "logprobs": [draw(LOGPROB) for _ in range(count)],
        "ranks": [draw(RANK) for _ in range(count)],
        "candidate_tokens": [draw(CANDIDATES) for _ in range(count)],
    }


def wants(request: dict[str, Any], key: str) -> bool:
    """Whether the request asks for logprobs of that kind, itself or in its envelope."""
    if request["output_options"].get(key) is not None:
        return True
    extra = request.get("extra_args")
    envelope = extra.get("vllm_tito") if isinstance(extra, dict) else None
    options = envelope.get("sampling_params") if isinstance(envelope, dict) else None
    return isinstance(options, dict) and options.get(key) is not None


@st.composite
def prompt_infos(draw: st.DrawFn, request: dict[str, Any]) -> wire.PromptInfo:
    """What the engine says about the prompt, which it may have expanded if there are raw media."""
    ids = list(request["token_ids"])
    if request.get("multi_modal_data") and draw(st.booleans()):
        ids = [*ids, *draw(st.lists(TOKEN, min_size=1, max_size=3))]
    info = wire.PromptInfo(num_prompt_tokens=len(ids))
    if wants(request, "prompt_logprobs"):
        columns = _columns(draw, len(ids))
        return wire.PromptInfo(num_prompt_tokens=len(ids), token_ids=ids, **columns)
    if draw(st.booleans()):
        info.token_ids = ids
    return info


@st.composite
def outputs(draw: st.DrawFn, request: dict[str, Any], count: int) -> wire.SequenceOutput:
    """A message with so many tokens."""
    columns = _columns(draw, count) if wants(request, "logprobs") else {}
    ids = [draw(TOKEN) for _ in range(count)]
    return wire.SequenceOutput(text=draw(TEXT), num_tokens=count, token_ids=ids, **columns)


@st.composite
def finish_infos(draw: st.DrawFn, request: dict[str, Any], total: int) -> wire.FinishInfo:
    """The end of a request."""
    reason = draw(st.sampled_from([REASONS.STOP, REASONS.STOP, REASONS.LENGTH, REASONS.ABORTED]))
    info = wire.FinishInfo(num_output_tokens=total, finish_reason=reason)
    stops = [*(request["stop_conditions"].get(f"stop_token_ids{kind}") or () for kind in ("", "_hidden"))]
    chosen = st.sampled_from(sorted({*itertools.chain(*stops), *request["eos_token_ids"]})) | TOKEN
    stop = draw(st.sampled_from(["none", "token", "eos", "text"]))
    if stop == "token":
        info.stop_token_id = draw(chosen)
    elif stop == "eos":
        info.eos_token_id = draw(chosen)
    elif stop == "text":
        info.stop_string = draw(TEXT)
    if draw(st.booleans()):
        info.kv_transfer_params = draw(PAYLOAD)
    if draw(st.booleans()):
        info.ec_transfer_params = draw(PAYLOAD)
    if draw(st.integers(0, 4)) == 0:
        info.num_cached_tokens = draw(st.integers(0, 5))
    return info


Messages = list[wire.GenerateResponse]


def _change(**changes: Any) -> Callable[[wire.SequenceOutput], None]:
    def apply(output: wire.SequenceOutput) -> None:
        for name, value in changes.items():
            setattr(output, name, value)

    return apply


OUTPUT_FLAWS = st.one_of(
    st.sampled_from(
        [
            _change(index=1),
            _change(num_tokens=7),
            _change(logprobs=[]),
            _change(ranks=[1] * 9),
            _change(candidate_tokens=[]),
        ]
    )
)
FINISH_FLAWS = [0, 4, 42, 999]


@st.composite
def replies(draw: st.DrawFn, request: dict[str, Any], role: str) -> Reply:
    """A stream for the request; one in three has a flaw."""
    if not request.get("token_ids"):
        return Reply()
    counts = [0] if role == "encode" else draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    if role == "prefill":
        counts = [1]
    messages: Messages = [wire.GenerateResponse(outputs=draw(outputs(request, count))) for count in counts]
    last = messages[-1].outputs
    assert last is not None
    last.finish_info = draw(finish_infos(request, sum(counts)))
    info = draw(prompt_infos(request))
    if draw(st.booleans()):
        messages.insert(0, wire.GenerateResponse(prompt_info=info))
    else:
        messages[0].prompt_info = info
    failure, opens = None, True
    flaw = draw(st.sampled_from(["none"] * 8 + ["output", "finish", "prompt", "cut", "failure", "again", "number"]))
    match flaw:
        case "output":
            chosen = draw(st.sampled_from([message.outputs for message in messages if message.outputs]))
            draw(OUTPUT_FLAWS)(chosen)
        case "finish":
            if draw(st.booleans()):
                last.finish_info.num_output_tokens += 1
            else:
                last.finish_info.finish_reason = REASONS(draw(st.sampled_from(FINISH_FLAWS)))
        case "prompt":
            info.num_prompt_tokens += 1
        case "cut":
            messages = messages[: draw(st.integers(0, len(messages) - 1))]
        case "failure":
            messages = messages[: draw(st.integers(0, len(messages) - 1))]
            failure, opens = (draw(STATUSES), "scripted"), bool(messages) or draw(st.booleans())
        case "again":
            messages.append(draw(st.sampled_from(messages)))
        case "number":
            number = draw(NUMBER | st.sampled_from([math.nan, math.inf, -math.inf]))
            struct = wire.Struct(fields={"number": wire.Value(number_value=float(number))})
            last.finish_info.kv_transfer_params = struct
            last.finish_info.ec_transfer_params = struct
    return Reply([bytes(message) for message in messages], failure, opens)
