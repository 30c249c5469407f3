"""What the mock engine accepts and refuses: every row of spec 16.3, and of the server's table as far as it applies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.mock_engine import job_of, mock_settings, request_of, token_settings
from trio_sidecar.engines.mock_facts import MockFacts
from trio_sidecar.engines.mock_request import Candidates, accept
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    CandidateTokens,
    DecodingParameters,
    DecodingParametersStringChoices,
    GenerateRequest,
    KvCacheParameters,
    MediaItem,
    RandomSampling,
    ResponseOptions,
    Struct,
    TokenIds,
)

INVALID = StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = StatusCode.UNIMPLEMENTED
TEXT = mock_settings(max_model_len=64)
TOKENS = token_settings()
VOCAB = 4629


def refused(request: GenerateRequest, settings: Any = TEXT, metadata: dict[str, str] | None = None) -> tuple[Any, str]:
    """Status and message of the refusal."""
    with pytest.raises(RpcError) as caught:
        accept(request, metadata or {}, MockFacts.resolve(settings))
    return caught.value.status, caught.value.detail


BOTH_MODES = [
    ("model", request_of(model="other"), StatusCode.NOT_FOUND, ["model 'other'", "mocker-model"]),
    ("no prompt", GenerateRequest(), INVALID, ["no prompt", "token_ids"]),
    ("empty ids", request_of([]), INVALID, ["token_ids is empty"]),
    ("n", request_of(sampling=RandomSampling(num_sequences=2)), INVALID, ["num_sequences 2", "0 and 1"]),
    ("lora", request_of(lora_name="a"), UNIMPLEMENTED, ["lora_name"]),
    ("media", request_of(media=[MediaItem()]), INVALID, ["media"]),
    ("ec", request_of(kv=KvCacheParameters(ec_transfer_params=Struct())), INVALID, ["ec_transfer_params"]),
    (
        "min",
        request_of(stopping={"max_new_tokens": 3, "min_new_tokens": 4}),
        INVALID,
        ["min_new_tokens 4", "max_new_tokens 3"],
    ),
    ("temperature", request_of(temperature=9.0), INVALID, ["temperature 9", "0 to 2"]),
    ("temperature below", request_of(temperature=-0.5), INVALID, ["temperature -0.5"]),
    ("temperature nan", request_of(temperature=math.nan), INVALID, ["temperature nan"]),
    ("top_p zero", request_of(sampling=RandomSampling(top_p=0.0)), INVALID, ["top_p 0", "greater than 0"]),
    ("top_p above", request_of(sampling=RandomSampling(top_p=1.5)), INVALID, ["top_p 1.5"]),
    ("min_p", request_of(sampling=RandomSampling(min_p=1.5)), INVALID, ["min_p 1.5"]),
    (
        "presence",
        request_of(decoding=DecodingParameters(presence_penalty=3)),
        INVALID,
        ["presence_penalty 3", "-2 to 2"],
    ),
    ("frequency", request_of(decoding=DecodingParameters(frequency_penalty=-3)), INVALID, ["frequency_penalty -3"]),
    ("repetition", request_of(decoding=DecodingParameters(repetition_penalty=-1)), INVALID, ["repetition_penalty -1"]),
    ("repetition inf", request_of(decoding=DecodingParameters(repetition_penalty=math.inf)), INVALID, ["repetition"]),
    ("stop string", request_of(stopping={"stop_strings": ["a", ""]}), INVALID, ["stop_strings", "empty"]),
    ("budget", request_of(stopping={"thinking_token_budget": -2}), INVALID, ["thinking_token_budget -2"]),
    ("truncate", request_of(truncate_prompt_tokens=40000), INVALID, ["truncate_prompt_tokens 40000", "max_model_len"]),
]


@pytest.mark.rule("R16.4", "R16.9")
@pytest.mark.parametrize("settings", [TEXT, TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("request_", "status", "words"), [row[1:] for row in BOTH_MODES], ids=[row[0] for row in BOTH_MODES]
)
def test_refused_in_both_modes(request_: GenerateRequest, settings: Any, status: StatusCode, words: list[str]) -> None:
    """The refusal names field, value and what is allowed."""
    got, message = refused(request_, settings)
    assert status == got
    assert [] == [word for word in words if word not in message]


TOKEN_MODE = [
    ("text", GenerateRequest(text="hi"), UNIMPLEMENTED, "token_ids"),
    ("bypass", request_of(kv=KvCacheParameters(bypass_prefix_cache=True)), INVALID, "bypass_prefix_cache"),
    ("salt", request_of(kv=KvCacheParameters(cache_salt="s")), INVALID, "cache_salt"),
    ("max", request_of(stopping={"max_new_tokens": 32769}), INVALID, "max_new_tokens must not exceed 32768"),
]


@pytest.mark.rule("R16.3")
@pytest.mark.parametrize(
    ("request_", "status", "word"), [row[1:] for row in TOKEN_MODE], ids=[row[0] for row in TOKEN_MODE]
)
def test_refused_in_token_mode(request_: GenerateRequest, status: StatusCode, word: str) -> None:
    """Token mode refuses what Dynamo's mocker refuses."""
    got, message = refused(request_, TOKENS)
    assert status == got
    assert word in message


def _logprobs(**options: Any) -> GenerateRequest:
    return request_of(response=ResponseOptions(**options))


TEXT_MODE = [
    ("empty text", GenerateRequest(text=""), INVALID, "text is empty"),
    ("json", request_of(decoding=DecodingParameters(json="{}")), INVALID, "decoding.json "),
    ("regex", request_of(decoding=DecodingParameters(regex="a")), INVALID, "decoding.regex"),
    (
        "choice",
        request_of(decoding=DecodingParameters(choice=DecodingParametersStringChoices(choices=["a"]))),
        INVALID,
        "choice",
    ),
    ("grammar", request_of(decoding=DecodingParameters(grammar="a")), INVALID, "decoding.grammar"),
    ("json object", request_of(decoding=DecodingParameters(json_object=True)), INVALID, "decoding.json_object"),
    ("tag", request_of(decoding=DecodingParameters(structural_tag="{}")), INVALID, "decoding.structural_tag"),
    ("bias", request_of(decoding=DecodingParameters(logit_bias={1: 1.0})), INVALID, "decoding.logit_bias"),
    ("allowed", request_of(decoding=DecodingParameters(allowed_token_ids=[1])), INVALID, "allowed_token_ids"),
    (
        "bad words",
        request_of(decoding=DecodingParameters(bad_words_token_ids=[TokenIds(ids=[1])])),
        INVALID,
        "bad_words",
    ),
    ("budget", request_of(stopping={"thinking_token_budget": 0}), INVALID, "thinking_token_budget"),
    ("salt", request_of(kv=KvCacheParameters(cache_salt="a/b")), INVALID, "cache_salt"),
    ("long salt", request_of(kv=KvCacheParameters(cache_salt="a" * 129)), INVALID, "128"),
    ("prompt id", request_of([5, VOCAB]), INVALID, f"prompt token id {VOCAB}"),
    ("stop id", request_of(stopping={"stop_token_ids": [VOCAB]}), INVALID, f"stop_token_ids id {VOCAB}"),
    ("full", request_of(range(64)), INVALID, "max_model_len 64"),
    ("too long", request_of(range(70)), INVALID, "prompt's 70 tokens"),
    ("top_n", _logprobs(output_logprobs=True, output_candidates=CandidateTokens(top_n=21)), INVALID, "top_n 21"),
    ("top_n huge", _logprobs(prompt_logprobs=True, prompt_candidates=CandidateTokens(top_n=2**32 - 1)), INVALID, "20"),
    (
        "prompt ids",
        _logprobs(prompt_logprobs=True, prompt_candidates=CandidateTokens(token_ids=TokenIds(ids=[1]))),
        INVALID,
        "prompt_candidates.token_ids",
    ),
    (
        "many ids",
        _logprobs(output_logprobs=True, output_candidates=CandidateTokens(token_ids=TokenIds(ids=[1] * 129))),
        INVALID,
        "129 ids",
    ),
    (
        "id range",
        _logprobs(output_logprobs=True, output_candidates=CandidateTokens(token_ids=TokenIds(ids=[VOCAB]))),
        INVALID,
        f"id {VOCAB}",
    ),
]


@pytest.mark.rule("FR-070")
@pytest.mark.parametrize(
    ("request_", "status", "word"), [row[1:] for row in TEXT_MODE], ids=[row[0] for row in TEXT_MODE]
)
def test_refused_in_text_mode(request_: GenerateRequest, status: StatusCode, word: str) -> None:
    """Text mode refuses what vLLM's server refuses, and what it would have to ignore."""
    got, message = refused(request_)
    assert status == got
    assert word in message


@pytest.mark.rule("R16.3")
@pytest.mark.parametrize("rank", ["x", "-1", "", "4294967296", "１"])  # noqa: RUF001 - a full-width digit is no ASCII
def test_rank_that_is_no_number(rank: str) -> None:
    """The rank is ASCII decimal and fits 32 bits."""
    status, message = refused(request_of(), metadata={"x-data-parallel-rank": rank})
    assert INVALID == status
    assert "x-data-parallel-rank" in message


@pytest.mark.rule("R16.3")
def test_rank_that_is_not_connected() -> None:
    """There is one rank, and the message lists it."""
    status, message = refused(request_of(), metadata={"x-data-parallel-rank": "1"})
    assert INVALID == status
    assert "[0]" in message
    accept(request_of(), {"x-data-parallel-rank": " 0 "}, MockFacts.resolve(TEXT))


@pytest.mark.rule("R16.3")
def test_prompt_larger_than_the_cache() -> None:
    """A prompt that the simulated cache cannot hold is refused for lack of resources."""
    settings = token_settings(block_size=2, num_gpu_blocks=2)
    assert StatusCode.RESOURCE_EXHAUSTED == refused(request_of(range(5)), settings)[0]
    job_of(request_of(range(4)), settings)


@pytest.mark.rule("R16.8", "FR-062")
def test_unset_max_new_tokens() -> None:
    """Token mode gives 20 tokens, text mode what is left of the context."""
    assert 20 == job_of(request_of(), TOKENS).max_tokens
    assert 61 == job_of(request_of(), TEXT).max_tokens


@pytest.mark.rule("R16.9")
def test_max_new_tokens_is_cut_to_the_context() -> None:
    """A prompt of 4 in a context of 8 leaves 4 tokens, and a minimum of 6 is refused with that number."""
    settings = token_settings(max_model_len=8)
    assert 4 == job_of(request_of(range(4), stopping={"max_new_tokens": 10}), settings).max_tokens
    _, message = refused(request_of(range(4), stopping={"max_new_tokens": 10, "min_new_tokens": 6}), settings)
    assert "effective max_new_tokens 4" in message


@pytest.mark.rule("R16.8")
def test_truncation_keeps_the_end() -> None:
    """The last tokens of the prompt are kept, and make it fit."""
    assert [68, 69] == list(job_of(request_of(range(70), truncate_prompt_tokens=2), TEXT).prompt)


@pytest.mark.rule("R16.12")
def test_token_mode_cuts_candidates() -> None:
    """More than 20 candidates are cut to 20, not refused."""
    wanted = CandidateTokens(top_n=50)
    options = ResponseOptions(
        output_logprobs=True,
        output_candidates=wanted,
        prompt_logprobs=True,
        prompt_candidates=CandidateTokens(token_ids=TokenIds(ids=list(range(30)))),
    )
    job = job_of(request_of(response=options), TOKENS)
    assert Candidates(20) == job.candidates
    assert Candidates(0, tuple(range(20))) == job.prompt_candidates


def test_candidates_count_only_with_logprobs() -> None:
    """Without logprobs the selectors have no effect, not even a wrong one."""
    options = ResponseOptions(
        output_candidates=CandidateTokens(top_n=99), prompt_candidates=CandidateTokens(token_ids=TokenIds(ids=[1]))
    )
    job = job_of(request_of(response=options), TEXT)
    assert (None, None) == (job.candidates, job.prompt_candidates)


def test_all_is_twenty() -> None:
    """A mock has no distribution over a whole vocabulary to show."""
    options = ResponseOptions(output_logprobs=True, output_candidates=CandidateTokens(all=True))
    assert Candidates(20) == job_of(request_of(response=options), TEXT).candidates


def test_text_prompt_is_tokenised_with_the_begin_token() -> None:
    """As vLLM's server does with raw text."""
    job = job_of(GenerateRequest(text="Hello"), TEXT)
    assert (2, 0) == (len(job.prompt), job.prompt[0])


def test_harmless_values_are_accepted() -> None:
    """Unset and neutral values, and cache controls that a server without a cache fulfils by itself."""
    request = request_of(
        temperature=0.0,
        sampling=RandomSampling(num_sequences=1, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        decoding=DecodingParameters(
            json_object=False, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1
        ),
        stopping={"thinking_token_budget": -1},
        kv=KvCacheParameters(bypass_prefix_cache=True, cache_salt="fine"),
        priority=-3,
    )
    job = job_of(request, TEXT)
    assert (True, True, False, -3) == (job.want_text, job.skip_special, job.want_ids, job.priority)


@pytest.mark.rule("FR-068")
def test_seed_counts_only_when_sampling() -> None:
    """Greedy decoding has nothing to seed."""
    seeded = RandomSampling(seed=7)
    assert None is job_of(request_of(sampling=seeded), TEXT).sampling_seed
    assert 7 == job_of(request_of(sampling=seeded, temperature=0.5), TEXT).sampling_seed
