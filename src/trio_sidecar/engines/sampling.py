"""GenerateRequest → what vLLM is asked for (wire-and-server 2 and 3); no import of vLLM.

Checks come in the order of vLLM's own server, and all of them before the stream starts, so that a refusal is a status
without a message. The order is that of two functions: :func:`open_request`, then tokenising, then :func:`build_job`.
What only vLLM can judge, such as a JSON schema, vLLM refuses when the job is submitted, which is before the stream
starts as well.
"""

from __future__ import annotations

import math
import re
import uuid
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.engines.sampling_checks import (
    check_bad_words,
    check_ids,
    check_media,
    check_penalties,
    check_range,
    check_salt,
    refuse,
    structured_output,
)
from trio_sidecar.errors import ProtocolError, StatusCode
from trio_sidecar.wire import (
    CandidateTokens,
    DecodingParameters,
    GenerateRequest,
    KvCacheParameters,
    LoraAdapter,
    RandomSampling,
    ResponseOptions,
    StoppingCriteria,
    Struct,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trio_sidecar.engines.vllm_facts import VllmFacts

__all__ = ["Candidates", "OpenRequest", "VllmJob", "build_job", "open_request"]

MAX_LOGPROB_IDS = 128
MAX_I32 = 2**31 - 1
ALL = -1
MAX_BIAS = 100.0
WHOLE_NUMBER = re.compile(r"\+?0*([0-9]{1,10})", re.ASCII)
"""A rank in a call's metadata."""


@attrs.frozen(slots=True)
class Candidates:
    """Which candidates to list beside a scored token.

    Attributes:
        count: How many of the best; -1 for the whole vocabulary.
        ids: These instead, if any.
    """

    count: int = 0
    ids: tuple[int, ...] = ()


@attrs.frozen(slots=True, kw_only=True)
class OpenRequest:
    """A request that has passed what can be checked before its prompt is tokenised."""

    request: GenerateRequest = attrs.field(repr=False)
    rank: int | None
    structured: dict[str, object] | None = attrs.field(repr=False)
    lora: LoraAdapter | None


@attrs.frozen(slots=True, kw_only=True)
class VllmJob:
    """An accepted request.

    Attributes:
        request_id: The caller's, or one that was made.
        prompt: Token ids, truncated as asked.
        params: Arguments of vLLM's ``SamplingParams``; ``structured`` apart.
        structured: Arguments of vLLM's ``StructuredOutputsParams``; None without a constraint.
        lora: The adapter to use.
        rank: Absolute data-parallel rank; None leaves the choice to vLLM.
        kv_hints: The envelope as JSON; None without one.
        candidates: None if no logprobs are asked for.
        prompt_candidates: None if no prompt logprobs are asked for.
    """

    request_id: str
    prompt: list[int] = attrs.field(repr=False)
    params: dict[str, Any] = attrs.field(repr=False)
    structured: dict[str, object] | None = attrs.field(default=None, repr=False)
    cache_salt: str | None = attrs.field(default=None, repr=False)
    lora: LoraAdapter | None = None
    priority: int = 0
    rank: int | None = None
    session_id: str | None = None
    kv_hints: dict[str, Any] | None = None
    reasoning_ended: bool | None = None
    reasoning_kwargs: dict[str, Any] = attrs.field(factory=dict)
    want_prompt_ids: bool = False
    want_text: bool = True
    want_ids: bool = False
    candidates: Candidates | None = None
    prompt_candidates: Candidates | None = None


def open_request(
    request: GenerateRequest,
    metadata: Mapping[str, str],
    facts: VllmFacts,
    find_lora: Callable[[str], LoraAdapter | None],
) -> OpenRequest:
    """Check what does not depend on the prompt's tokens.

    Args:
        request: The request.
        metadata: The call's metadata; only the data-parallel rank is read.
        facts: The engine.
        find_lora: The loaded adapter of a name.

    Raises:
        RpcError: It is refused.
    """
    rank = _rank(metadata, facts)
    if request.model and request.model not in facts.served_names:
        served = ", ".join(map(repr, facts.served_names))
        refuse(f"model {request.model!r} is not served; served is {served}", StatusCode.NOT_FOUND)
    if request.text is None and request.token_ids is None:
        refuse("the request has no prompt; set text or token_ids")
    if request.sampling is not None and request.sampling.num_sequences > 1:
        refuse(f"num_sequences {request.sampling.num_sequences} is not supported; allowed are 0 and 1")
    response = request.response
    if response is not None and response.prompt_logprobs and _selected_ids(response.prompt_candidates) is not None:
        refuse("prompt_candidates.token_ids is not supported; use top_n or all")
    structured = structured_output(request.decoding) if request.decoding is not None else None
    lora = None
    if request.lora_name:
        if not facts.supports_lora:
            refuse("lora_name is set, but the engine runs without --enable-lora", StatusCode.FAILED_PRECONDITION)
        lora = find_lora(request.lora_name)
        if lora is None:
            refuse(f"lora_name {request.lora_name!r} is not loaded", StatusCode.NOT_FOUND)
    check_media(request)
    return OpenRequest(request=request, rank=rank, structured=structured, lora=lora)


def build_job(opened: OpenRequest, prompt: Sequence[int], facts: VllmFacts) -> VllmJob:
    """Check the rest, and put the request into vLLM's terms.

    Args:
        opened: What :func:`open_request` accepted.
        prompt: The prompt's token ids, not truncated.
        facts: The engine.

    Raises:
        RpcError: It is refused.
    """
    request = opened.request
    ids = _prompt(request, prompt, facts)
    response = request.response or ResponseOptions()
    decoding = request.decoding or DecodingParameters()
    kv = request.kv or KvCacheParameters()
    candidates = (
        _candidates(response.output_candidates, "output_candidates", facts) if response.output_logprobs else None
    )
    prompt_candidates = (
        _candidates(response.prompt_candidates, "prompt_candidates", facts) if response.prompt_logprobs else None
    )
    params: dict[str, Any] = {"flat_logprobs": True}
    params |= _limits(request.stopping or StoppingCriteria(), len(ids), facts)
    params |= _randomness(request.temperature, request.sampling or RandomSampling(), decoding, facts)
    params |= _decoding(decoding, facts)
    params |= _logprobs(candidates, prompt_candidates)
    params["skip_special_tokens"] = response.skip_special_tokens is not False
    if request.watermarking is not None:  # absent is on where the engine can, without a warning where it cannot
        params["watermarking"] = request.watermarking
    if kv.bypass_prefix_cache:
        params["skip_reading_prefix_cache"] = True
    if extra := _transfer(kv):
        params["extra_args"] = extra
    check_salt(kv.cache_salt)
    gate = request.engine_reasoning_gate
    return VllmJob(
        request_id=request.request_id or str(uuid.uuid4()),
        prompt=ids,
        params=params,
        structured=opened.structured,
        cache_salt=kv.cache_salt or None,
        lora=opened.lora,
        priority=request.priority,
        rank=opened.rank,
        session_id=request.session_id or None,
        kv_hints=_kv_hints(request),
        reasoning_ended=gate.reasoning_ended if gate is not None else None,
        reasoning_kwargs=_json(gate.chat_template_kwargs, "chat_template_kwargs") if gate is not None else {},
        want_prompt_ids=response.prompt_token_ids,
        want_text=response.output_text is not False,
        want_ids=response.output_token_ids,
        candidates=candidates,
        prompt_candidates=prompt_candidates,
    )


def _rank(metadata: Mapping[str, str], facts: VllmFacts) -> int | None:
    text = metadata.get(RANK_METADATA_KEY)
    if text is None:
        return None
    digits = WHOLE_NUMBER.fullmatch(text.strip())
    if digits is None or int(digits[1]) >= 2**32:
        refuse(f"metadata {RANK_METADATA_KEY} {text!r} is not a whole number from 0 to {2**32 - 1}")
    rank = int(digits[1])
    if rank not in facts.ranks:
        reason = f"rank {rank} is not connected; connected ranks are {list(facts.ranks)}"
        refuse(f"metadata {RANK_METADATA_KEY}: {reason}")
    return rank


def _selected_ids(chosen: CandidateTokens | None) -> tuple[int, ...] | None:
    """The ids of a selector, None if it selects otherwise; an empty list selects nothing."""
    if chosen is None or chosen.token_ids is None:
        return None
    return tuple(chosen.token_ids.ids)


def _prompt(request: GenerateRequest, prompt: Sequence[int], facts: VllmFacts) -> list[int]:
    if not prompt:
        refuse(f"{'text' if request.text is not None else 'token_ids'} is empty; a prompt needs at least one token")
    limit = request.truncate_prompt_tokens
    asked = request.stopping.max_new_tokens if request.stopping is not None else 0
    if limit > (most := max(0, facts.max_model_len - asked)):
        refuse(
            f"truncate_prompt_tokens {limit} exceeds max_model_len {facts.max_model_len} less max_new_tokens {asked};"
            f" at most {most} are allowed"
        )
    ids = list(prompt[-limit:] if limit else prompt)
    if (highest := max(ids)) > facts.max_prompt_id:
        refuse(f"prompt token id {highest} is out of range; ids are 0 to {facts.max_prompt_id}")
    return ids


def _candidates(chosen: CandidateTokens | None, field: str, facts: VllmFacts) -> Candidates:
    if chosen is None:
        return Candidates()
    ids = _selected_ids(chosen)
    if ids:
        if len(ids) > MAX_LOGPROB_IDS:
            refuse(f"{field}.token_ids has {len(ids)} ids; at most {MAX_LOGPROB_IDS} are allowed")
        check_ids(ids, f"{field}.token_ids", facts.vocab_size)
        return Candidates(ids=ids)
    count = ALL if chosen.all else chosen.top_n or 0
    if count > MAX_I32:
        count -= 2**32  # as vLLM's server casts it: the highest number means all
        if count != ALL:
            refuse(f"{field}.top_n {chosen.top_n} is out of range; allowed are 0 to {MAX_I32}")
    limit = facts.vocab_size if facts.max_logprobs == ALL else facts.max_logprobs
    wanted = facts.vocab_size if count == ALL else count
    if wanted > limit:
        refuse(f"{field} asks for {wanted} candidates; at most {limit} are allowed (--max-logprobs)")
    return Candidates(count)


def _logprobs(candidates: Candidates | None, prompt_candidates: Candidates | None) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if candidates is not None:
        if candidates.ids:
            params["logprob_token_ids"] = list(candidates.ids)
        else:
            params["logprobs"] = candidates.count
    if prompt_candidates is not None:
        params["prompt_logprobs"] = prompt_candidates.count
    return params


def _limits(stopping: StoppingCriteria, prompt_len: int, facts: VllmFacts) -> dict[str, Any]:
    """How long the answer may be, and what ends it."""
    left = facts.max_model_len - prompt_len
    if left <= 0:
        refuse(
            f"the prompt's {prompt_len} tokens leave no room in max_model_len {facts.max_model_len};"
            f" at most {facts.max_model_len - 1} are allowed"
        )
    most = min(stopping.max_new_tokens or int(facts.defaults.get("max_tokens") or left), left)
    if stopping.min_new_tokens > most:
        refuse(f"min_new_tokens {stopping.min_new_tokens} is greater than the effective max_new_tokens {most}")
    budget = stopping.thinking_token_budget
    if budget is not None and budget < -1:
        refuse(f"thinking_token_budget {budget} is out of range; allowed are -1 (no limit) and above")
    if not all(stopping.stop_strings):
        refuse("stop_strings holds an empty string")
    check_ids(stopping.stop_token_ids, "stop_token_ids", facts.vocab_size)
    return {
        "max_tokens": most,
        "min_tokens": stopping.min_new_tokens,
        "stop": list(stopping.stop_strings) or None,
        "stop_token_ids": list(stopping.stop_token_ids) or None,
        "include_stop_str_in_output": stopping.include_stop_strings,
        "ignore_eos": stopping.ignore_eos,
        "thinking_token_budget": None if budget in (None, -1) else budget,
    }


def _randomness(
    temperature: float | None, sampling: RandomSampling, decoding: DecodingParameters, facts: VllmFacts
) -> dict[str, Any]:
    """Greedy unless a temperature is given; the other knobs fall back to the model's own defaults."""
    defaults = facts.defaults
    heat = 0.0 if temperature is None else temperature
    top_k = int(defaults.get("top_k", 0)) if sampling.top_k is None else sampling.top_k
    top_p = float(defaults.get("top_p", 1.0)) if sampling.top_p is None else sampling.top_p
    min_p = float(defaults.get("min_p", 0.0)) if sampling.min_p is None else sampling.min_p
    presence = decoding.presence_penalty or float(defaults.get("presence_penalty", 0.0))
    frequency = decoding.frequency_penalty or float(defaults.get("frequency_penalty", 0.0))
    repetition = decoding.repetition_penalty or float(defaults.get("repetition_penalty", 1.0))
    check_range(heat, "temperature", 0.0, 2.0)
    check_range(top_p, "top_p", 0.0, 1.0, open_low=True)
    check_range(min_p, "min_p", 0.0, 1.0)
    check_penalties(presence, frequency, repetition)
    return {
        "temperature": heat,
        "top_k": min(top_k, MAX_I32),
        "top_p": top_p,
        "min_p": min_p,
        "seed": sampling.seed,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }


def _decoding(decoding: DecodingParameters, facts: VllmFacts) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if decoding.logit_bias:
        check_ids(decoding.logit_bias, "logit_bias", facts.vocab_size)
        if any(math.isnan(bias) for bias in decoding.logit_bias.values()):
            refuse("logit_bias holds NaN; allowed are numbers")
        params["logit_bias"] = {
            token: min(MAX_BIAS, max(-MAX_BIAS, bias)) for token, bias in decoding.logit_bias.items()
        }
    if decoding.allowed_token_ids:
        sizes = [size for size in (facts.tokenizer_size, facts.vocab_size) if size]
        check_ids(decoding.allowed_token_ids, "allowed_token_ids", min(sizes))
        params["allowed_token_ids"] = list(decoding.allowed_token_ids)
    if decoding.bad_words_token_ids:
        words = [list(word.ids) for word in decoding.bad_words_token_ids]
        check_bad_words(words, facts)
        params["_bad_words_token_ids"] = words
    return params


def _transfer(kv: KvCacheParameters) -> dict[str, Any]:
    """The transfer parameters for vLLM's connectors.

    Where a decode engine fetches the prompt's KV from its prefiller, the encoder's part has served its purpose.
    """
    extra: dict[str, Any] = {}
    if kv.kv_transfer_params is not None:
        extra["kv_transfer_params"] = _json(kv.kv_transfer_params, "kv_transfer_params")
    remote = extra.get("kv_transfer_params", {}).get("do_remote_prefill") is True
    if kv.ec_transfer_params is not None and not remote:
        extra["ec_transfer_params"] = _json(kv.ec_transfer_params, "ec_transfer_params")
    return extra


def _kv_hints(request: GenerateRequest) -> dict[str, Any] | None:
    hints = request.kv_hints
    if hints is None:
        return None
    return {
        "protocol_version": hints.protocol_version,
        "message_id": hints.message_id,
        "actions": [
            {
                "action_id": action.action_id,
                "action_type": action.action_type,
                "action_version": action.action_version,
                "payload": _json(action.payload, "kv_hints payload"),
            }
            for action in hints.actions
        ],
    }


def _json(struct: Struct | None, label: str) -> dict[str, Any]:
    if struct is None:
        return {}
    try:
        return dict(json_from_struct(struct, label=label))
    except ProtocolError as error:
        refuse(error.reason)
