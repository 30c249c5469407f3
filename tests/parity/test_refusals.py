"""Requests that are refused: the same status on both servers, streamed or not, and before any message."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support import vllm_model
from support.deviations import deviation
from support.parity import refusal, request
from support.vllm_servers import CONTEXT_LENGTH

if TYPE_CHECKING:
    from support.parity import Pair

HELLO = "Hello"
BAD, MISSING = "INVALID_ARGUMENT", "NOT_FOUND"
BEYOND = vllm_model.VOCAB
"""The first id that the model does not have; the tokenizer has fewer."""
TOKENIZER_BEYOND = BEYOND - 10

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": (MISSING, {"model": "nobody"}),
    "no prompt": (BAD, {"text": None}),
    "empty ids": (BAD, {"token_ids": {"ids": []}}),
    "prompt id": (BAD, {"token_ids": {"ids": [5, BEYOND]}}),
    "largest prompt id": (BAD, {"token_ids": {"ids": [2**32 - 1]}}),
    "sequences": (BAD, {"sampling": {"num_sequences": 2}}),
    "full prompt": (BAD, {"token_ids": {"ids": [5] * CONTEXT_LENGTH}}),
    "long prompt": (BAD, {"token_ids": {"ids": [5] * (CONTEXT_LENGTH + 1)}}),
    "truncated to the context": (BAD, {
        "token_ids": {"ids": [5] * (CONTEXT_LENGTH + 9)}, "truncate_prompt_tokens": CONTEXT_LENGTH
    }),
    "truncated beyond the context": (BAD, {"truncate_prompt_tokens": CONTEXT_LENGTH + 1}),
    "truncated without room": (BAD, {
        "truncate_prompt_tokens": CONTEXT_LENGTH - 1, "stopping": {"max_new_tokens": 2}
    }),
    "lora": (MISSING, {"lora_name": "nobody"}),
    "media with text": (BAD, {"media": [{"modality": 1, "url": "http://localhost/a.png"}]}),
    "media": (BAD, {"token_ids": {"ids": [5]}, "media": [{"modality": 1, "url": "http://localhost/a.png"}]}),
    "media without a source": (BAD, {"token_ids": {"ids": [5]}, "media": [{"modality": 1}]}),
    "media of no kind": (BAD, {"token_ids": {"ids": [5]}, "media": [{"url": "http://localhost/a.png"}]}),
    "media of an unknown kind": (BAD, {"token_ids": {"ids": [5]}, "media": [{"modality": 9, "url": "http://a"}]}),
    "media truncated": (BAD, {
        "token_ids": {"ids": [5, 6]}, "truncate_prompt_tokens": 1, "media": [{"modality": 1, "url": "http://a"}]
    }),
    "features": (BAD, {"token_ids": {"ids": [5]}, "media": [{"modality": 1, "features": {"kwargs": b"\x80"}}]}),
    "least above most": (BAD, {"stopping": {"max_new_tokens": 3, "min_new_tokens": 4}}),
    "least above the model's most": (BAD, {
        "stopping": {"min_new_tokens": vllm_model.DEFAULTS["max_new_tokens"] + 1}
    }),
    "least above the context": (BAD, {
        "stopping": {"max_new_tokens": 2 * CONTEXT_LENGTH, "min_new_tokens": CONTEXT_LENGTH}
    }),
    "thinking budget": (BAD, {"stopping": {"thinking_token_budget": -2}}),
    "empty stop string": (BAD, {"stopping": {"stop_strings": ["x", ""]}}),
    "stop token": (BAD, {"stopping": {"stop_token_ids": [BEYOND]}}),
    "bias": (BAD, {"decoding": {"logit_bias": {BEYOND: 1.0}}}),
    "allowed token": (BAD, {"decoding": {"allowed_token_ids": [TOKENIZER_BEYOND]}}),
    "empty bad word": (BAD, {"decoding": {"bad_words_token_ids": [{"ids": []}]}}),
    "bad word": (BAD, {"decoding": {"bad_words_token_ids": [{"ids": [TOKENIZER_BEYOND]}]}}),
    **{f"temperature {value}": (BAD, {"temperature": value}) for value in (2.01, -0.1, math.nan, math.inf)},
    **{f"top_p {value}": (BAD, {"sampling": {"top_p": value}}) for value in (0.0, 1.1, -0.1, math.nan)},
    **{f"min_p {value}": (BAD, {"sampling": {"min_p": value}}) for value in (1.1, -0.1, math.nan)},
    **{
        f"{name} {value}": (BAD, {"decoding": {name: value}})
        for name in ("presence_penalty", "frequency_penalty")
        for value in (2.1, -2.1, math.nan)
    },
    **{f"repetition {value}": (BAD, {"decoding": {"repetition_penalty": value}}) for value in (-1, math.nan, math.inf)},
    "prompt candidates by id": (BAD, {
        "response": {"prompt_logprobs": True, "prompt_candidates": {"token_ids": {"ids": [5]}}}
    }),
    **{
        f"{side} candidates {select}": (BAD, {"response": {f"{side}_logprobs": True, f"{side}_candidates": select}})
        for side in ("prompt", "output")
        for select in ({"top_n": 21}, {"top_n": 2**32 - 1}, {"all": True})
    },
    "129 candidate ids": (BAD, {
        "response": {"output_logprobs": True, "output_candidates": {"token_ids": {"ids": [5] * 129}}}
    }),
    "candidate id": (BAD, {
        "response": {"output_logprobs": True, "output_candidates": {"token_ids": {"ids": [BEYOND]}}}
    }),
}  # fmt: skip


def asked(fields: dict[str, Any]) -> Any:
    """A request with a text prompt, unless the fields say otherwise."""
    if not fields.keys() & {"text", "token_ids"}:
        fields = {"text": HELLO} | fields
    return request(**{name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize("name", REFUSED)
def test_refused(both: Pair, name: str) -> None:
    """Each row of the table of errors; ours says what was wrong."""
    code, fields = REFUSED[name]
    assert "" != both.refuse(asked(fields), code).detail


@pytest.mark.parametrize("rank", ["", "1", "-1", "x", "0x0", "1_0", str(2**32 - 1), str(2**32)])
def test_rank(both: Pair, rank: str) -> None:
    """Ranks that are no number, or not there."""
    both.refuse(request(HELLO), BAD, metadata={"x-data-parallel-rank": rank})


def test_the_order_of_checks(both: Pair) -> None:
    """Of several faults in one request the first in the order counts."""
    faults = {"model": "nobody", "sampling": {"num_sequences": 2}, "lora_name": "nobody", "temperature": 9.0}
    both.refuse(request(HELLO, **faults), BAD, metadata={"x-data-parallel-rank": "x"})
    both.refuse(request(HELLO, **faults), MISSING)
    both.refuse(request(**(faults | {"model": ""})), BAD)
    both.refuse(request(HELLO, lora_name="nobody", temperature=9.0), MISSING)


def test_a_server_without_adapters(plain: Pair) -> None:
    """Asking for an adapter is then not a matter of its name."""
    plain.refuse(request(HELLO, lora_name="nobody"), "FAILED_PRECONDITION")


def test_a_server_without_a_limit_for_logprobs(plain: Pair) -> None:
    """The vocabulary is the limit then."""
    response = {"output_logprobs": True, "output_candidates": {"top_n": BEYOND + 1}}
    plain.refuse(request(HELLO, response=response), BAD)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("nan-bias", {"decoding": {"logit_bias": {5: math.nan}}}),
        ("bad-words-limits", {"decoding": {"bad_words_token_ids": [{"ids": [5]}] * 129}}),
        ("bad-words-limits", {"decoding": {"bad_words_token_ids": [{"ids": [5] * 1025}]}}),
        ("salt-limits", {"kv": {"cache_salt": "s" * 129}}),
        ("salt-limits", {"kv": {"cache_salt": "a/b"}}),
        ("salt-limits", {"kv": {"cache_salt": "a@b"}}),
        ("thinking-budget", {"stopping": {"max_new_tokens": 3, "thinking_token_budget": 0}}),
    ],
    ids=["nan", "many-bad-words", "long-bad-word", "long-salt", "slash", "at", "budget"],
)
def test_refused_by_us_only(both: Pair, name: str, fields: dict[str, Any]) -> None:
    """What vllm-rs 0.32.0 lets pass."""
    deviation(name)
    message = request(HELLO, **({"stopping": {"max_new_tokens": 3}} | fields))
    assert [BAD, BAD] == [both.ours.unary(message).code, both.ours.stream(message).code]
    assert "OK" == both.theirs.unary(message).code


@pytest.mark.parametrize(
    ("data", "name"),
    [(b"\xff\xff", "tag"), (b"\x0a\x02\xff\xff", "text"), (b"\x0a\x05ab", "length")],
    ids=["tag", "text", "length"],
)
def test_what_is_no_message(both: Pair, data: bytes, name: str) -> None:
    """Bytes that do not decode are the caller's fault for us, and internal for vllm-rs."""
    deviation("undecodable")
    codes = []
    for server in both:
        with pytest.raises(grpc.RpcError) as caught:
            server.channel.unary_unary("/vllm.Inference/Generate")(data, timeout=10)
        codes.append(refusal(caught.value).code)
    assert [BAD, "INTERNAL"] == codes
