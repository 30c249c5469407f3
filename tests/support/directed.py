"""The frame of directed comparisons: a request or a reply for one rule, put to both workers in every role it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from support.recorder import Reply
from support.reply_strategies import wants
from support.samples import candidates, minimal_request
from trio_sidecar import wire
from trio_sidecar.convert.struct import struct_from_json

if TYPE_CHECKING:
    from collections.abc import Sequence

REASONS = wire.FinishInfoFinishReason
ROLES = ("agg", "prefill", "decode", "encode")
GENERATING = ("agg", "decode")
TOKENS_ONLY = ("agg", "prefill", "decode")
HANDOFF_ANSWER = {"do_remote_prefill": True, "remote_port": 5600, "nested": {"flags": [True, None, "x"]}}
ENCODED = {"request_id": "encode-0", "ec_items": [{"key": "image-a", "shape": [1, 729, 2048]}]}


@attrs.frozen(slots=True)
class Directed:
    """One comparison for some rules.

    Attributes:
        name: What is special about it.
        rules: Their numbers.
        request: What is asked; a role adds what it needs.
        messages: What the engine answers; None for something sound.
        roles: In which roles it is put.
    """

    name: str
    rules: tuple[str, ...]
    request: dict[str, Any]
    messages: Sequence[wire.GenerateResponse] | None = None
    roles: tuple[str, ...] = ROLES


def case(name: str, *rules: str, roles: tuple[str, ...] = ROLES, **fields: Any) -> Directed:
    """A comparison whose request differs from the minimal one in these fields; see ``minimal_request``."""
    return Directed(name, rules, minimal_request(**fields), roles=roles)


def answer(
    name: str,
    *rules: str,
    messages: Sequence[wire.GenerateResponse],
    roles: tuple[str, ...] = GENERATING,
    **fields: Any,
) -> Directed:
    """A comparison whose reply is special."""
    return Directed(name, rules, minimal_request(**fields), messages, roles)


def in_role(request: dict[str, Any], role: str) -> dict[str, Any]:
    """The same request with what no request in that role may lack."""
    if role == "decode" and "prefill_result" not in request:
        return {**request, "prefill_result": {"disaggregated_params": {"remote_port": 20097}}}
    if role == "encode" and "multi_modal_data" not in request and not _prepared(request):
        return {**request, "multi_modal_data": {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}}
    return request


def _prepared(request: dict[str, Any]) -> bool:
    extra = request.get("extra_args")
    envelope = extra.get("vllm_tito") if isinstance(extra, dict) else None
    return isinstance(envelope, dict) and "features" in envelope


def reply_in_role(messages: Sequence[wire.GenerateResponse] | None, request: dict[str, Any], role: str) -> Reply:
    """The messages, or a sound stream of two tokens that has everything that the request asks for."""
    return Reply([bytes(message) for message in (_sound(request, role) if messages is None else messages)])


def _sound(request: dict[str, Any], role: str) -> list[wire.GenerateResponse]:
    ids = request["token_ids"]
    info = wire.PromptInfo(num_prompt_tokens=len(ids), token_ids=ids)
    if wants(request, "prompt_logprobs"):
        info = wire.PromptInfo(num_prompt_tokens=len(ids), token_ids=ids, **columns(len(ids)))
    tokens = {"encode": [], "prefill": [42]}.get(role, [42, 43])
    scores = columns(len(tokens)) if wants(request, "logprobs") else {}
    finish = wire.FinishInfo(
        num_output_tokens=len(tokens),
        finish_reason=REASONS.STOP,
        kv_transfer_params=struct_from_json(HANDOFF_ANSWER, label="kv"),
        ec_transfer_params=struct_from_json(ENCODED, label="ec"),
    )
    output = wire.SequenceOutput(text=" token", num_tokens=len(tokens), token_ids=tokens, finish_info=finish, **scores)
    return [wire.GenerateResponse(prompt_info=info), wire.GenerateResponse(outputs=output)]


def columns(count: int) -> dict[str, Any]:
    """Logprobs, ranks and candidates of so many tokens."""
    return {
        "logprobs": [-0.25] * count,
        "ranks": [1] * count,
        "candidate_tokens": [candidates((43, -0.5, 2)) for _ in range(count)],
    }
