"""Sampling, stopping and response options of a request (spec 7.2 to 7.5)."""

from __future__ import annotations

from trio_sidecar.convert.fields import MAX_INT32, MAX_UINT32, Section, describe
from trio_sidecar.convert.guides import apply_guide
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import CandidateTokens, DecodingParameters, RandomSampling, ResponseOptions, StoppingCriteria

__all__ = [
    "candidates",
    "check_length_penalty",
    "check_sampling",
    "check_top_k_sign",
    "check_zero_disables",
    "decoding_parameters",
    "random_sampling",
    "response_options",
    "stopping_criteria",
    "temperature",
]

# Absent means the API's documented 1.0. On the wire, absent would mean greedy.
_DEFAULT_TEMPERATURE = 1.0

_FLOAT32_EPSILON = 2.0**-23
_DISABLED_TOP_K = (-1, 0)


def check_sampling(sampling: Section) -> None:
    """Refuse what the protocol has no field for: several sequences, beams (spec 7.5, in the order of R7.11)."""
    for key in ("n", "best_of"):
        count = sampling.uint32(key)
        if count not in (None, 1):
            reason = f"{key} must be 1, got {count}"
            raise InvalidRequest(reason)
    if sampling.flag("use_beam_search"):
        reason = "use_beam_search must be false, got true: beam search is not supported"
        raise InvalidRequest(reason)


def check_zero_disables(sampling: Section) -> None:
    """Refuse values that switch a filter off (R7.4): the protocol cannot tell "disabled" from "default"."""
    top_k = sampling.int32("top_k")
    if top_k in _DISABLED_TOP_K:
        # The front end turns a client's 0 into -1, so the message names both.
        reason = f"top_k must be at least 1, got {top_k}: vLLM gRPC cannot switch it off (0 or -1) for one request"
        raise InvalidRequest(reason)
    if sampling.float32("min_p") == 0.0:
        reason = "min_p must be above 0, got 0: vLLM gRPC cannot switch it off for one request"
        raise InvalidRequest(reason)


def check_length_penalty(sampling: Section) -> None:
    """Refuse a length penalty, which only beam search would use."""
    penalty = sampling.float32("length_penalty")
    if penalty is not None and abs(penalty - 1.0) > _FLOAT32_EPSILON:
        reason = f"length_penalty must be 1.0, got {penalty}"
        raise InvalidRequest(reason)


def check_top_k_sign(sampling: Section) -> None:
    """Refuse a top_k below -1 in any mode (R7.3)."""
    key = "top_k"
    top_k = sampling.int32(key)
    if top_k is not None and top_k < -1:
        raise sampling.refuse(key, f"an integer from -1 to {MAX_INT32}")


def temperature(sampling: Section) -> float:
    """The temperature to send; an explicit 0.0 stays 0.0."""
    value = sampling.float32("temperature")
    return _DEFAULT_TEMPERATURE if value is None else value


def random_sampling(sampling: Section) -> RandomSampling:
    """Filters and seed; absent ones stay absent."""
    top_k = sampling.int32("top_k")
    return RandomSampling(
        num_sequences=1,
        top_k=None if top_k is None else max(top_k, 0),
        top_p=sampling.float32("top_p"),
        min_p=sampling.float32("min_p"),
        seed=sampling.int64("seed"),
    )


def decoding_parameters(sampling: Section) -> DecodingParameters:
    """Penalties and the guide."""
    decoding = DecodingParameters(
        presence_penalty=sampling.float32("presence_penalty") or 0.0,
        frequency_penalty=sampling.float32("frequency_penalty") or 0.0,
        repetition_penalty=sampling.float32("repetition_penalty") or 0.0,
    )
    apply_guide(sampling.section("guided_decoding"), decoding)
    return decoding


def stopping_criteria(
    stop: Section, sampling: Section, stop_ids: frozenset[int], *, one_token: bool
) -> StoppingCriteria:
    """Limits and stops.

    Args:
        stop: The stop conditions.
        sampling: The sampling options, which say whether stop texts stay in the output.
        stop_ids: The union of the user's and the model's stop ids.
        one_token: Ask for exactly one token, whatever the request says.
    """
    max_tokens, min_tokens = stop.uint32("max_tokens") or 0, stop.uint32("min_tokens") or 0
    return StoppingCriteria(
        max_new_tokens=1 if one_token else max_tokens,
        min_new_tokens=1 if one_token else min_tokens,
        stop_token_ids=sorted(stop_ids),
        stop_strings=stop.texts("stop") or [],
        include_stop_strings=sampling.flag("include_stop_str_in_output") or False,
        ignore_eos=stop.flag("ignore_eos") or False,
    )


def response_options(output: Section, *, prompt_ids: bool) -> ResponseOptions:
    """What the answers shall carry; a count of 0 still asks for the selected token's logprob.

    Args:
        output: The output options.
        prompt_ids: Ask for the prompt's token ids even where no logprobs of it are wanted.
    """
    logprobs, prompt_logprobs = output.uint32("logprobs"), output.uint32("prompt_logprobs")
    return ResponseOptions(
        prompt_token_ids=prompt_ids or prompt_logprobs is not None,
        prompt_logprobs=prompt_logprobs is not None,
        prompt_candidates=candidates(prompt_logprobs, "prompt_logprobs"),
        output_text=True,
        output_token_ids=True,
        output_logprobs=logprobs is not None,
        output_candidates=candidates(logprobs, "logprobs"),
        skip_special_tokens=output.flag("skip_special_tokens"),
    )


def candidates(count: int | None, name: str) -> CandidateTokens | None:
    """How many alternatives to report per position; the largest uint32 means all (R7.6, R7.7)."""
    if count is None:
        return None
    if count == MAX_UINT32:
        return CandidateTokens(all=True)
    if count > MAX_INT32:
        reason = f"{name} must fit in i32, or be {MAX_UINT32} for all, got {describe(count)}"
        raise InvalidRequest(reason)
    return CandidateTokens(top_n=count)
