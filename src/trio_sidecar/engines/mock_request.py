"""What the mock engine accepts: checks of a request, in the order of vLLM's server, and what is left to do after them.

Two tables apply. In token mode it is that of Dynamo's mocker (spec 16.3). In text mode it is that of vLLM's own server,
and what a mock cannot honour is refused rather than ignored. Sampling parameters are checked and have no further
effect: nothing is sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import attrs

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.engines.contract import RANK_METADATA_KEY
from trio_sidecar.engines.mock_checks import check_numbers, check_unsupported
from trio_sidecar.engines.mock_encoder import EncodedItem, check_encoder_result, check_media_to_encode, encoded_items
from trio_sidecar.engines.mock_facts import MAX_CANDIDATES, MockFacts
from trio_sidecar.engines.mock_handoff import check_role
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import CandidateTokens, GenerateRequest, ResponseOptions, StoppingCriteria

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Candidates", "MockJob", "accept"]

TOKEN_MODE_DEFAULT_TOKENS = 20
TOKEN_MODE_MAX_TOKENS = 32768
MAX_LOGPROB_IDS = 128


@attrs.frozen(slots=True)
class Candidates:
    """Which candidates to list beside a scored token: the best ``count``, or ``ids`` if given."""

    count: int = 0
    ids: tuple[int, ...] = ()


@attrs.frozen(slots=True, kw_only=True)
class MockJob:
    """An accepted request, in the engine's own terms.

    Attributes:
        max_tokens: Resolved: neither 0 nor beyond the context.
        sampling_seed: None for greedy decoding and for unseeded sampling.
        candidates: None if no logprobs are asked for.
        prompt_candidates: None if no prompt logprobs are asked for.
        rank: The data-parallel rank; None leaves it to the engine.
        adapter: The LoRA adapter; empty for none.
        encoded: What to hand over of its media; nothing unless this is an encode server.
        uses_cache: Whether its prompt may share blocks with others.
        cached_tokens: How many of its tokens did.
    """

    request_id: str
    prompt: Sequence[int] = attrs.field(repr=False)
    priority: int
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = attrs.field(repr=False)
    include_stop: bool
    ignore_eos: bool
    sampling_seed: int | None
    want_prompt_ids: bool
    want_text: bool
    want_ids: bool
    skip_special: bool
    candidates: Candidates | None
    prompt_candidates: Candidates | None
    rank: int | None = None
    adapter: str = ""
    encoded: tuple[EncodedItem, ...] = ()
    uses_cache: bool = True
    cached_tokens: int = 0


def refuse(reason: str, status: StatusCode = StatusCode.INVALID_ARGUMENT) -> NoReturn:
    """Raise the RpcError that refuses a request."""
    raise RpcError(status, reason)


def accept(request: GenerateRequest, metadata: Mapping[str, str], facts: MockFacts) -> MockJob:
    """Check a request.

    Raises:
        RpcError: It is refused; the message names field, value and what is allowed.
    """
    rank = _rank(metadata, facts.data_parallel_size)
    if request.model not in ("", facts.served_model_name):
        refuse(f"model {request.model!r} is not served; served is {facts.served_model_name!r}", StatusCode.NOT_FOUND)
    prompt = _prompt(request, facts)
    if request.sampling is not None and request.sampling.num_sequences > 1:
        refuse(f"num_sequences {request.sampling.num_sequences} is not supported; allowed are 0 and 1")
    check_unsupported(request, facts)
    check_role(request.kv, facts.mode)
    _check_media(request, facts)
    response = request.response or ResponseOptions()
    stopping = request.stopping or StoppingCriteria()
    limit = request.truncate_prompt_tokens
    if limit > facts.max_model_len:
        refuse(f"truncate_prompt_tokens {limit} exceeds max_model_len {facts.max_model_len}")
    if limit:
        prompt = prompt[-limit:]
    tokenizer = facts.tokenizer
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    if vocab_size is not None and max(prompt) >= vocab_size:
        refuse(f"prompt token id {max(prompt)} is out of range; ids are 0 to {vocab_size - 1}")
    candidates = (
        _candidates(response.output_candidates, "output_candidates", vocab_size) if response.output_logprobs else None
    )
    prompt_candidates = (
        _candidates(response.prompt_candidates, "prompt_candidates", vocab_size) if response.prompt_logprobs else None
    )
    max_tokens, min_tokens = _token_limits(stopping, len(prompt), facts)
    check_numbers(request, vocab_size)
    sampled = request.temperature is not None and request.temperature > 0.0
    return MockJob(
        request_id=request.request_id,
        prompt=prompt,
        priority=request.priority,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=frozenset(stopping.stop_token_ids),
        stop_strings=tuple(stopping.stop_strings),
        include_stop=stopping.include_stop_strings,
        ignore_eos=stopping.ignore_eos,
        sampling_seed=request.sampling.seed if sampled and request.sampling is not None else None,
        want_prompt_ids=response.prompt_token_ids,
        want_text=response.output_text is not False,
        want_ids=response.output_token_ids,
        skip_special=response.skip_special_tokens is not False,
        candidates=candidates,
        prompt_candidates=prompt_candidates,
        rank=rank,
        adapter=request.lora_name,
        encoded=encoded_items(request.media) if facts.mode is DisaggregationMode.ENCODE else (),
        uses_cache=request.kv is None or not (request.kv.bypass_prefix_cache or request.kv.cache_salt),
    )


def _check_media(request: GenerateRequest, facts: MockFacts) -> None:
    if facts.mode is DisaggregationMode.ENCODE:
        check_media_to_encode(request.media)
    elif request.kv is not None and request.kv.ec_transfer_params is not None:
        check_encoder_result(request.kv.ec_transfer_params, request.media)


def _rank(metadata: Mapping[str, str], size: int) -> int | None:
    text = metadata.get(RANK_METADATA_KEY)
    if text is None:
        return None
    trimmed = text.strip()
    if not (trimmed.isascii() and trimmed.isdigit() and len(trimmed) <= 10 and int(trimmed) < 2**32):
        refuse(f"metadata {RANK_METADATA_KEY} {text!r} is not a whole number from 0 to {2**32 - 1}")
    rank = int(trimmed)
    if rank >= size:
        refuse(f"metadata {RANK_METADATA_KEY}: rank {rank} is not connected; connected ranks are {list(range(size))}")
    return rank


def _prompt(request: GenerateRequest, facts: MockFacts) -> Sequence[int]:
    """The prompt's ids, not empty."""
    if request.text is not None:
        if facts.tokenizer is None:
            refuse("a text prompt is not supported in token mode; send token_ids", StatusCode.UNIMPLEMENTED)
        if not request.text:
            refuse("text is empty; a prompt needs at least one token")
        return facts.tokenizer.encode(request.text, add_bos=True)
    if request.token_ids is None:
        refuse("the request has no prompt; set text or token_ids")
    if not request.token_ids.ids:
        refuse("token_ids is empty; a prompt needs at least one token")
    return request.token_ids.ids


def _candidates(chosen: CandidateTokens | None, field: str, vocab_size: int | None) -> Candidates:
    """How many candidates, or which; token mode cuts at the limit (R16.12), text mode refuses what vLLM refuses."""
    if chosen is None:
        return Candidates()
    if chosen.all:
        return Candidates(MAX_CANDIDATES)
    ids = tuple(chosen.token_ids.ids) if chosen.token_ids is not None else ()
    count = chosen.top_n or 0
    if vocab_size is None:
        return Candidates(min(count, MAX_CANDIDATES), ids[:MAX_CANDIDATES])
    if count > MAX_CANDIDATES:
        refuse(f"{field}.top_n {count} is more than the maximum of {MAX_CANDIDATES}")
    if chosen.token_ids is not None and field == "prompt_candidates":
        refuse("prompt_candidates.token_ids is not supported; use top_n or all")
    if len(ids) > MAX_LOGPROB_IDS:
        refuse(f"{field}.token_ids has {len(ids)} ids; at most {MAX_LOGPROB_IDS} are allowed")
    if ids and max(ids) >= vocab_size:
        refuse(f"{field}.token_ids id {max(ids)} is out of range; ids are 0 to {vocab_size - 1}")
    return Candidates(count, ids)


def _token_limits(stopping: StoppingCriteria, prompt_len: int, facts: MockFacts) -> tuple[int, int]:
    """Most and fewest tokens to answer with."""
    if prompt_len > facts.kv_tokens:
        reason = f"the prompt's {prompt_len} tokens do not fit the simulated KV cache of {facts.kv_tokens} tokens"
        refuse(reason, StatusCode.RESOURCE_EXHAUSTED)
    left = facts.max_model_len - prompt_len
    if left <= 0:
        refuse(
            f"the prompt's {prompt_len} tokens leave no room in max_model_len {facts.max_model_len};"
            f" at most {facts.max_model_len - 1} are allowed"
        )
    wanted = stopping.max_new_tokens
    if facts.tokenizer is None:
        if wanted > TOKEN_MODE_MAX_TOKENS:
            refuse(f"max_new_tokens must not exceed {TOKEN_MODE_MAX_TOKENS}, not {wanted}")
        wanted = wanted or TOKEN_MODE_DEFAULT_TOKENS
    most = min(wanted or left, left)
    least = stopping.min_new_tokens
    if least > most:
        refuse(f"min_new_tokens {least} is greater than the effective max_new_tokens {most}")
    return most, least
