"""Checks of single fields for the mock engine: what it cannot do, and ranges of numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import DecodingParameters, GenerateRequest, RandomSampling, StoppingCriteria

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_sidecar.engines.mock_facts import MockFacts

__all__ = ["check_numbers", "check_unsupported"]

MAX_SALT_CHARS = 128
_BAD_SALT_CHARS = frozenset("@/\\\0")


def check_unsupported(request: GenerateRequest, facts: MockFacts) -> None:
    """Refuse what this engine would have to ignore.

    Token mode follows Dynamo's mocker, which ignores the decoding parameters and has no use for cache controls.

    Raises:
        RpcError: UNIMPLEMENTED for a LoRA name (spec 16.3); INVALID_ARGUMENT for the rest, so that whoever asked for it
            gets an answer that names the field, not an internal error.
    """
    text_mode = facts.tokenizer is not None
    if request.lora_name and not facts.max_loras:
        raise RpcError(StatusCode.UNIMPLEMENTED, "lora_name is not supported by the mock engine")
    for field in _unsupported(request, facts):
        raise RpcError(StatusCode.INVALID_ARGUMENT, f"{field} is not supported by the mock engine")
    kv = request.kv
    if kv is None:
        return
    if not text_mode:
        # There is no shared cache to bypass or to partition, and pretending would hide a routing mistake.
        if kv.bypass_prefix_cache:
            raise RpcError(StatusCode.INVALID_ARGUMENT, "kv.bypass_prefix_cache is not supported by the mock engine")
        if kv.cache_salt:
            raise RpcError(StatusCode.INVALID_ARGUMENT, "kv.cache_salt is not supported by the mock engine")
    elif len(kv.cache_salt) > MAX_SALT_CHARS or not _BAD_SALT_CHARS.isdisjoint(kv.cache_salt):
        reason = f"kv.cache_salt must have at most {MAX_SALT_CHARS} characters, none of them '@', '/', '\\' or NUL"
        raise RpcError(StatusCode.INVALID_ARGUMENT, reason)


def _unsupported(request: GenerateRequest, facts: MockFacts) -> Iterator[str]:
    if request.media and not facts.multimodal:
        yield "media"
    takes_result = facts.multimodal and facts.mode is not DisaggregationMode.ENCODE
    if request.kv is not None and request.kv.ec_transfer_params is not None and not takes_result:
        yield "kv.ec_transfer_params"
    if facts.tokenizer is None:
        return
    decoding = request.decoding or DecodingParameters()
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        if getattr(decoding, name) is not None:
            yield f"decoding.{name}"
    if decoding.json_object:
        yield "decoding.json_object"
    for name in ("logit_bias", "allowed_token_ids", "bad_words_token_ids"):
        if getattr(decoding, name):
            yield f"decoding.{name}"
    budget = (request.stopping or StoppingCriteria()).thinking_token_budget
    if budget is not None and budget >= 0:
        yield "stopping.thinking_token_budget"


def check_numbers(request: GenerateRequest, vocab_size: int | None) -> None:
    """Check the ranges of sampling and stopping fields, as vLLM's server does.

    Args:
        request: The request.
        vocab_size: Ids must be below it; None in token mode, which accepts any id.

    Raises:
        RpcError: INVALID_ARGUMENT, with field, value and range.
    """
    for field, value, fine, allowed in _ranges(request):
        if not (math.isfinite(value) and fine):
            raise RpcError(StatusCode.INVALID_ARGUMENT, f"{field} {value:g} is out of range; allowed is {allowed}")
    stopping = request.stopping
    if stopping is None:
        return
    if "" in stopping.stop_strings:
        raise RpcError(
            StatusCode.INVALID_ARGUMENT, "stopping.stop_strings holds an empty string; each needs a character"
        )
    highest = max(stopping.stop_token_ids, default=0)
    if vocab_size is not None and highest >= vocab_size:
        reason = f"stopping.stop_token_ids id {highest} is out of range; ids are 0 to {vocab_size - 1}"
        raise RpcError(StatusCode.INVALID_ARGUMENT, reason)


def _ranges(request: GenerateRequest) -> Iterator[tuple[str, float, bool, str]]:
    """Field, value, whether it is in range, and the range in words."""
    sampling = request.sampling or RandomSampling()
    decoding = request.decoding or DecodingParameters()
    if (temperature := request.temperature) is not None:
        yield "temperature", temperature, 0.0 <= temperature <= 2.0, "0 to 2"
    if (top_p := sampling.top_p) is not None:
        yield "sampling.top_p", top_p, 0.0 < top_p <= 1.0, "greater than 0, at most 1"
    if (min_p := sampling.min_p) is not None:
        yield "sampling.min_p", min_p, 0.0 <= min_p <= 1.0, "0 to 1"
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: float = getattr(decoding, name)
        yield f"decoding.{name}", penalty, -2.0 <= penalty <= 2.0, "-2 to 2"
    repetition = decoding.repetition_penalty
    yield "decoding.repetition_penalty", repetition, repetition >= 0.0, "greater than 0, or 0 for unset"
    budget = (request.stopping or StoppingCriteria()).thinking_token_budget
    if budget is not None:
        yield "stopping.thinking_token_budget", budget, budget >= -1, "-1 and above"
