"""One reply or more for each rule of converting answers (spec 8 and 9)."""

from __future__ import annotations

import math
from typing import Any

import grpc

from support.directed import ENCODED, HANDOFF_ANSWER, REASONS, ROLES, TOKENS_ONLY, Directed, answer, columns
from support.recorder import Reply
from support.samples import IMAGES, candidates, finished, prompt_info, tokens
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.wire import GenerateResponse, SequenceOutput, Struct, Value

__all__ = ["FAILURES", "REPLIES"]

KV = struct_from_json(HANDOFF_ANSWER, label="kv")
EC = struct_from_json(ENCODED, label="ec")
STOP, LENGTH, ABORTED = REASONS.STOP, REASONS.LENGTH, REASONS.ABORTED
PREFILL, ENCODE = ("prefill",), ("encode",)
MEDIA: dict[str, Any] = {"multi_modal_data": {"image_url": [{"Url": url} for url in IMAGES]}}
SCORED: dict[str, Any] = {"output": {"logprobs": 1}}
PROMPT_SCORED: dict[str, Any] = {"output": {"prompt_logprobs": 1}}


def end(*ids: int, **finish: Any) -> GenerateResponse:
    """A terminal with these tokens: a stop, and the ``count`` of all tokens is theirs, unless given."""
    total, reason = finish.pop("count", len(ids)), finish.pop("reason", STOP)
    return tokens(*ids, text=finish.pop("text", ""), finish=finished(total, reason, **finish))


def scored(*ids: int, **changes: Any) -> GenerateResponse:
    """Tokens with logprobs, some column changed."""
    return tokens(*ids, text="x", scored=True, **changes)


def scored_prompt(*ids: int, count: int | None = None, **changes: Any) -> GenerateResponse:
    """A prompt with logprobs, some column changed."""
    return prompt_info(len(ids) if count is None else count, **{"token_ids": list(ids), **columns(len(ids)), **changes})


def number(value: float) -> Struct:
    """A payload of one number."""
    return Struct(fields={"number": Value(number_value=value), "empty": Value()})


DELTAS = [
    answer("no outputs", "R8.1", messages=[GenerateResponse(), prompt_info(), end(42)]),
    answer("empty output", "R8.2", messages=[GenerateResponse(outputs=SequenceOutput()), end(42)]),
    answer("deltas", "R8.3", "R8.7", "R8.14", messages=[tokens(42, text="a"), end(43, 44, count=3)]),
    answer("buffered text", "R8.4", messages=[tokens(42), tokens(43, text=" buffered text"), end(count=2)]),
    answer("text without tokens", "R8.5", messages=[tokens(text="lost"), end(42)]),
    answer("no tokens wanted", "R8.6", roles=PREFILL, messages=[end(42, text="x", kv_transfer_params=KV)]),
    answer("two prefill chunks", "R8.6", roles=PREFILL, messages=[tokens(42), end(count=1, kv_transfer_params=KV)]),
    answer("tokens in the terminal", "R8.11", messages=[end(42, 43, text="ab")]),
]

MALFORMED = [
    answer("index", "8.2", roles=ROLES, messages=[tokens(42, index=1)]),
    answer("num_tokens", "8.2", roles=ROLES, messages=[tokens(42, num_tokens=2)]),
    answer("wrong total", "8.2", roles=TOKENS_ONLY, messages=[end(42, count=2, kv_transfer_params=KV)]),
    answer("unknown reason", "8.2", roles=ROLES, messages=[end(reason=42, kv_transfer_params=KV)]),
    answer("not finished", "8.2", roles=ROLES, messages=[end(reason=0, kv_transfer_params=KV)]),
    *(
        answer(f"no {column}", "8.2", "R8.8", messages=[scored(42, **{column: []})], **SCORED)
        for column in ("logprobs", "ranks", "candidate_tokens")
    ),
    answer("no logprobs in prefill", "R8.8", roles=PREFILL, messages=[end(42, kv_transfer_params=KV)], **SCORED),
    answer("prompt count", "8.2", "R8.27", roles=TOKENS_ONLY, messages=[prompt_info(4)]),
    answer(
        "prompt columns",
        "8.2",
        roles=ROLES,
        messages=[scored_prompt(11, 22, 33, candidate_tokens=[])],
        **PROMPT_SCORED,
    ),
    answer("index before count", "R8.9", messages=[tokens(42, index=1, num_tokens=3)]),
    answer("late fault", "R8.10", messages=[tokens(101, text="a"), end(count=1, reason=999)]),
]

Fields = dict[str, Any]
STOPS: list[tuple[Fields, Fields]] = [
    ({"stop_string": "done"}, {}),
    ({"stop_string": ""}, {}),
    ({"stop_token_id": 42}, {"stop_token_ids": [42]}),
    ({"stop_token_id": 2}, {"stop_token_ids_hidden": [2]}),
    ({"eos_token_id": 2}, {"stop_token_ids_hidden": [2]}),
    ({"eos_token_id": 2}, {}),
    ({"eos_token_id": 2}, {"stop_token_ids": [2]}),
    ({"stop_token_id": 2}, {"stop_token_ids": [2], "stop_token_ids_hidden": [2]}),
    ({"stop_token_id": 9}, {}),
]
"""What ended a request, and which stops it had asked for."""

TERMINALS = [
    *(
        answer(reason.name.lower(), "R8.12", "R8.13", messages=[tokens(42, text="a"), end(43, count=2, reason=reason)])
        for reason in (LENGTH, STOP, ABORTED)
    ),
    answer("cached", "R8.13", messages=[end(42, num_cached_tokens=2)]),
    answer("no payload", "R8.15", messages=[end(42)]),
    answer("payload", "R8.16", messages=[end(42, kv_transfer_params=KV)]),
    answer("encoder payload", "R8.39", messages=[end(42, ec_transfer_params=EC)]),
    *(
        answer(f"stop reason {place}", "8.4", "R8.17", messages=[end(42, **finish)], stop=stop)
        for place, (finish, stop) in enumerate(STOPS)
    ),
]

LOGPROBS = [
    answer("not asked for", "R8.19", messages=[scored(42, finish=finished(1))]),
    answer("the selected only", "R8.19", messages=[scored(42, finish=finished(1))], output={"logprobs": 0}),
    answer(
        "rows as they come",
        "R8.20",
        "R8.21",
        messages=[
            scored(
                42,
                50,
                logprobs=[-0.25, -0.75],
                ranks=[1, 3],
                candidate_tokens=[candidates((43, -0.5, 2), (42, -0.1, 9)), candidates((51, -0.5, 1))],
                finish=finished(2),
            )
        ],
        **SCORED,
    ),
    answer(
        "no numbers",
        "R8.22",
        messages=[
            scored(
                1,
                2,
                3,
                4,
                logprobs=[math.nan, math.inf, -math.inf, -1e30],
                candidate_tokens=[candidates((43, value, 2)) for value in (math.nan, math.inf, -math.inf, -9999.5)],
                finish=finished(4),
            )
        ],
        **SCORED,
    ),
    answer("prompt", "R8.23", "R8.24", messages=[scored_prompt(11, 22, 33), end(42)], **PROMPT_SCORED),
    answer(
        "prompt beside tokens",
        "R8.23",
        messages=[
            GenerateResponse(prompt_info=scored_prompt(11, 22, 33).prompt_info, outputs=tokens(42).outputs),
            end(count=1),
        ],
        **PROMPT_SCORED,
    ),
    answer(
        "same candidate",
        "R8.25",
        messages=[scored_prompt(11, 22, 33, candidate_tokens=[candidates((22, -7.0, 4))] * 3), end(42)],
        **PROMPT_SCORED,
    ),
    answer(
        "prompt without numbers",
        "R8.26",
        messages=[scored_prompt(11, 22, 33, logprobs=[-math.inf, math.nan, -1e30]), end(42)],
        **PROMPT_SCORED,
    ),
    answer("prompt not asked for", "R8.27", messages=[scored_prompt(11, 22, 33, logprobs=[]), end(42)]),
    answer("lost with the terminal", "R8.28", messages=[scored_prompt(11, 22, 33), tokens(42)], **PROMPT_SCORED),
]

EXPANDED = list(range(100, 106))
ROLE_ENDS = [
    answer("expanded prompt", "R8.29", messages=[prompt_info(601), end(42)], **MEDIA),
    answer(
        "expanded prompt handed over",
        "R8.30",
        roles=PREFILL,
        messages=[prompt_info(6, token_ids=EXPANDED), end(42, kv_transfer_params=KV)],
        **MEDIA,
    ),
    answer("no expanded prompt", "R8.30", roles=PREFILL, messages=[end(42, kv_transfer_params=KV)], **MEDIA),
    answer("short expanded prompt", "R8.30", roles=PREFILL, messages=[prompt_info(6, token_ids=[1])], **MEDIA),
    *(
        answer(f"prefill {name}", "8.8", roles=PREFILL, messages=[end(42, reason=reason, **payload)])
        for name, reason, payload in (
            ("stop", STOP, {"kv_transfer_params": KV}),
            ("length", LENGTH, {"kv_transfer_params": KV}),
            ("empty payload", STOP, {"kv_transfer_params": Struct()}),
            ("without payload", STOP, {}),
            ("aborted", ABORTED, {}),
            ("aborted with payload", ABORTED, {"kv_transfer_params": KV}),
        )
    ),
    answer(
        "aborted prefill keeps the prompt's logprobs",
        "R8.32",
        roles=PREFILL,
        messages=[scored_prompt(11, 22, 33), end(42, reason=ABORTED)],
        **PROMPT_SCORED,
    ),
    answer("aborted prefill with media", "R8.32", roles=PREFILL, messages=[end(42, reason=ABORTED)], **MEDIA),
    answer(
        "aborted prefill with a bare count",
        "R8.30",
        "R8.32",
        roles=PREFILL,
        messages=[prompt_info(6), end(42, reason=ABORTED)],
        **MEDIA,
    ),
    *(
        answer(f"encode {name}", *rules, roles=ENCODE, messages=[prompt_info(), message])
        for name, rules, message in (
            ("stop", ("R8.34",), end(ec_transfer_params=EC)),
            ("without payload", ("R8.35",), end()),
            ("length", ("R8.36",), end(reason=LENGTH, ec_transfer_params=EC)),
            ("token", ("R8.37",), end(42, ec_transfer_params=EC)),
            ("aborted", ("R8.38",), end(reason=ABORTED)),
            ("aborted with payload", ("R8.38",), end(reason=ABORTED, ec_transfer_params=EC)),
        )
    ),
    answer(
        "prompt logprobs of an encode",
        "R8.23",
        roles=ENCODE,
        messages=[scored_prompt(11, 22, 33), end(ec_transfer_params=EC)],
        **PROMPT_SCORED,
    ),
]

PREPARED = answer(
    "prepared media are counted already",
    "R8.31",
    messages=[prompt_info(5)],
    extra_args={
        "vllm_tito": {
            "sampling_params": {},
            "features": {
                "mm_hashes": {"image": ["h"]},
                "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
                "kwargs_data": {"image": ["gA=="]},
            },
        }
    },
)

STRUCTS = [
    *(
        answer(f"number {value}", *rules, messages=[end(42, kv_transfer_params=number(value))])
        for value, rules in (
            (42.0, ("R9.8", "R9.9")),
            (-0.0, ("R9.8",)),
            (5600.5, ("R9.8",)),
            (2.0**53, ("R9.8",)),
            (2.0**53 + 2, ("R9.8",)),
            (1e300, ("R9.8",)),
            (math.nan, ("R9.7",)),
            (math.inf, ("R9.7",)),
        )
    ),
]

REPLIES: list[Directed] = [*DELTAS, *MALFORMED, *TERMINALS, *LOGPROBS, *ROLE_ENDS, PREPARED, *STRUCTS]

STREAMS: dict[str, tuple[tuple[GenerateResponse, ...], bool]] = {
    "refused": ((), False),
    "failed": ((), True),
    "cut": ((tokens(42, text="a"),), True),
}
FAILURES = {
    f"{code.name} {name}": Reply([bytes(message) for message in messages], (code, "scripted"), opens)
    for code in grpc.StatusCode
    if code is not grpc.StatusCode.OK
    for name, (messages, opens) in STREAMS.items()
} | {"ended early": Reply([bytes(tokens(42, text="a"))]), "empty": Reply()}
"""How an engine can fail, by name (R4.1, R10.15, R10.16)."""
