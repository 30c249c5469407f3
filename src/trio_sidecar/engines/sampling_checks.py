"""Checks of single values in a request to vLLM (wire-and-server 3); each refuses by naming field, value and range."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, NoReturn

from trio_sidecar.errors import RpcError, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_sidecar.engines.vllm_facts import VllmFacts
    from trio_sidecar.wire import DecodingParameters, GenerateRequest

__all__ = ["check_bad_words", "check_ids", "check_penalties", "check_salt", "refuse", "structured_output"]

MAX_SALT_CHARS = 128
BAD_SALT_CHARS = frozenset("@/\\\0")
DEFAULT_MAX_BAD_WORDS = 128
DEFAULT_MAX_BAD_WORD_TOKENS = 1024


def refuse(reason: str, status: StatusCode = StatusCode.INVALID_ARGUMENT) -> NoReturn:
    """Raise the RpcError that refuses a request."""
    raise RpcError(status, reason)


def check_range(value: float, field: str, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a number outside a range, NaN and infinity included."""
    above = value > low if open_low else value >= low
    if not (above and value <= high):
        refuse(f"{field} {value:g} is out of range; allowed is {'more than ' if open_low else ''}{low:g} to {high:g}")


def check_penalties(presence: float, frequency: float, repetition: float) -> None:
    """Refuse penalties that vLLM does not take."""
    check_range(presence, "presence_penalty", -2.0, 2.0)
    check_range(frequency, "frequency_penalty", -2.0, 2.0)
    if not (repetition > 0.0 and math.isfinite(repetition)):
        refuse(f"repetition_penalty {repetition:g} is out of range; allowed are finite numbers above 0")


def check_ids(ids: Iterable[int], field: str, size: int) -> None:
    """Refuse a token id outside a vocabulary."""
    highest = max(ids, default=0)
    if highest >= size:
        refuse(f"{field} holds token id {highest}; the vocabulary's ids are 0 to {size - 1}")


def check_bad_words(words: Sequence[Sequence[int]], facts: VllmFacts) -> None:
    """Refuse empty, too many or too long token sequences; vLLM's own variables set the limits."""
    most = int(os.environ.get("VLLM_MAX_NUM_BAD_WORDS", DEFAULT_MAX_BAD_WORDS))
    longest = int(os.environ.get("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", DEFAULT_MAX_BAD_WORD_TOKENS))
    if not all(words):
        refuse("bad_words_token_ids holds an empty sequence; each needs at least one token id")
    if len(words) > most:
        refuse(f"bad_words_token_ids has {len(words)} sequences; at most {most} are allowed")
    if (total := sum(map(len, words))) > longest:
        refuse(f"bad_words_token_ids has {total} token ids in all; at most {longest} are allowed")
    for word in words:
        check_ids(word, "bad_words_token_ids", facts.tokenizer_size or facts.vocab_size)


def check_salt(salt: str) -> None:
    """Refuse a cache salt that cannot be part of vLLM's keys."""
    if len(salt) > MAX_SALT_CHARS:
        refuse(f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed")
    if BAD_SALT_CHARS.intersection(salt):
        refuse("cache_salt holds one of the characters @ / \\ NUL, which are not allowed")


def structured_output(decoding: DecodingParameters) -> dict[str, object] | None:
    """The one constraint of a request, in vLLM's names; None without one.

    Raises:
        RpcError: INVALID_ARGUMENT, it can be no constraint whatever the backend.
    """
    if decoding.json is not None:
        _check_json(decoding.json, "json")
        return {"json": decoding.json}
    if decoding.regex is not None:
        if "\0" in decoding.regex:
            refuse("regex holds a NUL character, which is not allowed")
        return {"regex": decoding.regex}
    if decoding.choice is not None:
        if not decoding.choice.choices:
            refuse("choice has no choices; it needs at least one")
        return {"choice": list(decoding.choice.choices)}
    if decoding.grammar is not None:
        if not decoding.grammar.strip():
            refuse("grammar is empty")
        return {"grammar": decoding.grammar}
    if decoding.structural_tag is not None:
        if not decoding.structural_tag.strip():
            refuse("structural_tag is empty")
        _check_json(decoding.structural_tag, "structural_tag")
        return {"structural_tag": decoding.structural_tag}
    return {"json_object": True} if decoding.json_object else None


def _check_json(text: str, field: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"{field} is not JSON: {str(error) or 'nested too deeply'}")


def check_media(request: GenerateRequest) -> None:
    """Refuse media: the engine of this process serves text only, and says so in GetModelInfo."""
    if not request.media:
        return
    if request.text is not None:
        refuse("media need a token_ids prompt, not text")
    if request.truncate_prompt_tokens:
        refuse("truncate_prompt_tokens cannot be combined with media")
    refuse("this model does not support media")
