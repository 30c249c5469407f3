"""Requests in vLLM's terms, and what is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from support.vllm_fakes import facts
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.engines.sampling import Candidates, VllmJob, build_job, open_request
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    CandidateTokens,
    DecodingParameters,
    DecodingParametersStringChoices,
    EngineReasoningGate,
    GenerateRequest,
    KvCacheParameters,
    KvHintAction,
    KvHintsEnvelope,
    LoraAdapter,
    MediaItem,
    RandomSampling,
    ResponseOptions,
    StoppingCriteria,
    TokenIds,
)

if TYPE_CHECKING:
    from trio_sidecar.engines.vllm_facts import VllmFacts

PROMPT = [1, 2, 3, 4]
ADAPTER = LoraAdapter(lora_id=3, lora_name="poet", source_path="/loras/poet")


def find_lora(name: str) -> LoraAdapter | None:
    return ADAPTER if name == "poet" else None


def accept(engine: VllmFacts | None = None, metadata: dict[str, str] | None = None, **fields: Any) -> VllmJob:
    """The job of a request with a prompt of four tokens."""
    engine = engine or facts(supports_lora=True)
    fields = {"token_ids": TokenIds(ids=PROMPT)} | fields
    request = GenerateRequest(**fields)
    opened = open_request(request, metadata or {}, engine, find_lora)
    return build_job(opened, PROMPT if request.token_ids is None else request.token_ids.ids, engine)


def refused(status: StatusCode, words: str, **fields: Any) -> None:
    """The request is refused with that status and a message that holds the words."""
    with pytest.raises(RpcError, match=words) as caught:
        accept(**fields)
    assert status == caught.value.status


def test_a_bare_request_is_greedy_and_fills_the_context() -> None:
    """Without options: temperature 0, all that is left of the context, neutral knobs, an id of its own."""
    job = accept()
    assert PROMPT == job.prompt
    assert len(job.request_id) == 36
    expected = {
        "temperature": 0.0,
        "max_tokens": 60,
        "min_tokens": 0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "thinking_token_budget": None,
        "skip_special_tokens": True,
        "flat_logprobs": True,
    }
    assert expected == job.params
    assert (None, None, True, False, False) == (
        job.candidates,
        job.prompt_candidates,
        job.want_text,
        job.want_ids,
        job.want_prompt_ids,
    )


def test_explicit_values_reach_vllm() -> None:
    """Every field of the contract has its place; none is dropped (FR-068)."""
    job = accept(
        request_id="r",
        model="small",
        temperature=0.5,
        sampling=RandomSampling(num_sequences=1, top_k=7, top_p=0.5, min_p=0.25, seed=0),
        decoding=DecodingParameters(
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={5: 400.0, 6: -1.0},
            allowed_token_ids=[5, 6],
            regex="a+",
            bad_words_token_ids=[TokenIds(ids=[7, 8])],
        ),
        stopping=StoppingCriteria(
            max_new_tokens=9,
            min_new_tokens=2,
            stop_token_ids=[11, 10],
            stop_strings=["x"],
            include_stop_strings=True,
            ignore_eos=True,
            thinking_token_budget=0,
        ),
        kv=KvCacheParameters(bypass_prefix_cache=True, cache_salt="salt"),
        priority=-3,
        session_id="s",
        lora_name="poet",
        watermarking=False,
        engine_reasoning_gate=EngineReasoningGate(
            reasoning_ended=False, chat_template_kwargs=struct_from_json({"thinking": True}, label="kwargs")
        ),
        kv_hints=KvHintsEnvelope(
            protocol_version="1",
            message_id="m",
            actions=[KvHintAction(action_id="a", action_type="t", action_version="2")],
        ),
        metadata={"x-data-parallel-rank": " 1 "},
    )
    expected = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: 100.0, 6: -1.0},
        "allowed_token_ids": [5, 6],
        "_bad_words_token_ids": [[7, 8]],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [11, 10],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "thinking_token_budget": 0,
        "skip_reading_prefix_cache": True,
        "skip_special_tokens": True,
        "watermarking": False,
        "flat_logprobs": True,
    }
    assert expected == job.params
    assert {"regex": "a+"} == job.structured
    assert ("r", "salt", -3, "s", 1, ADAPTER) == (
        job.request_id,
        job.cache_salt,
        job.priority,
        job.session_id,
        job.rank,
        job.lora,
    )
    assert (False, {"thinking": True}) == (job.reasoning_ended, job.reasoning_kwargs)
    hint = {"action_id": "a", "action_type": "t", "action_version": "2", "payload": {}}
    assert {"protocol_version": "1", "message_id": "m", "actions": [hint]} == job.kv_hints


def test_defaults_of_the_model_fill_gaps_but_not_the_temperature() -> None:
    """The generation config's values apply where the request says nothing; 0 penalties count as nothing."""
    defaults = {"top_k": 5, "top_p": 0.75, "repetition_penalty": 1.25, "max_tokens": 12, "presence_penalty": 0.5}
    engine = facts(defaults=defaults)
    params = accept(engine).params
    assert (0.0, 5, 0.75, 1.25, 12, 0.5) == (
        params["temperature"],
        params["top_k"],
        params["top_p"],
        params["repetition_penalty"],
        params["max_tokens"],
        params["presence_penalty"],
    )
    explicit = accept(engine, sampling=RandomSampling(top_k=0), stopping=StoppingCriteria(max_new_tokens=500)).params
    assert (0, 60) == (explicit["top_k"], explicit["max_tokens"])


@pytest.mark.parametrize(
    ("chosen", "params", "candidates"),
    [
        (None, {"logprobs": 0}, Candidates()),
        (CandidateTokens(top_n=5), {"logprobs": 5}, Candidates(5)),
        (CandidateTokens(token_ids=TokenIds()), {"logprobs": 0}, Candidates()),
        (CandidateTokens(all=False), {"logprobs": 0}, Candidates()),
        (CandidateTokens(token_ids=TokenIds(ids=[4, 4])), {"logprob_token_ids": [4, 4]}, Candidates(ids=(4, 4))),
    ],
)
def test_candidate_selectors(chosen: CandidateTokens | None, params: dict[str, Any], candidates: Candidates) -> None:
    """Each way to select candidates, and nothing at all unless logprobs are asked for."""
    job = accept(response=ResponseOptions(output_logprobs=True, output_candidates=chosen))
    assert params == {key: value for key, value in job.params.items() if "logprob" in key and key != "flat_logprobs"}
    assert candidates == job.candidates
    silent = accept(response=ResponseOptions(output_candidates=chosen, prompt_candidates=chosen))
    assert None is silent.candidates
    assert None is silent.prompt_candidates


@pytest.mark.parametrize("chosen", [CandidateTokens(all=True), CandidateTokens(top_n=2**32 - 1)])
def test_all_candidates_need_an_engine_that_allows_them(chosen: CandidateTokens) -> None:
    """``all``, and the number that vLLM's server casts to it, mean the whole vocabulary."""
    options = ResponseOptions(output_logprobs=True, output_candidates=chosen)
    assert accept(facts(max_logprobs=-1), response=options).params["logprobs"] == -1
    refused(StatusCode.INVALID_ARGUMENT, "100 candidates; at most 20", response=options)


def test_prompt_logprobs() -> None:
    """The prompt has a selector of its own, which cannot name ids."""
    options = ResponseOptions(prompt_logprobs=True, prompt_candidates=CandidateTokens(top_n=2))
    assert accept(response=options).params["prompt_logprobs"] == 2
    ids = CandidateTokens(token_ids=TokenIds(ids=[1]))
    bad = ResponseOptions(prompt_logprobs=True, prompt_candidates=ids)
    refused(StatusCode.INVALID_ARGUMENT, "prompt_candidates.token_ids", response=bad)


def test_truncation_keeps_the_end() -> None:
    """The last N ids of the prompt stay."""
    assert [3, 4] == accept(truncate_prompt_tokens=2).prompt
    assert PROMPT == accept(truncate_prompt_tokens=9).prompt


def test_truncation_leaves_room_for_what_is_asked() -> None:
    """The tokens to keep and those to generate must fit together; without a number of the latter, any prompt may."""
    stopping = StoppingCriteria(max_new_tokens=4)
    assert PROMPT == accept(truncate_prompt_tokens=60, stopping=stopping).prompt
    refused(
        StatusCode.INVALID_ARGUMENT,
        "truncate_prompt_tokens 61 exceeds .* 64 less max_new_tokens 4",
        truncate_prompt_tokens=61,
        stopping=stopping,
    )
    assert PROMPT == accept(truncate_prompt_tokens=64).prompt


@pytest.mark.parametrize("text", ["1", " 1 ", "+1", "00000000001"])
def test_spellings_of_a_rank(text: str) -> None:
    """A rank may be spelled as vLLM's own server reads numbers."""
    assert 1 == accept(metadata={"x-data-parallel-rank": text}).rank


def test_transfer_parameters() -> None:
    """They come as JSON with whole numbers as integers; a remote prefill makes the encoder's part pointless."""
    kv: dict[str, Any] = {"port": 5600, "share": 0.5}
    ec: dict[str, Any] = {"ec_items": []}
    both = KvCacheParameters(
        kv_transfer_params=struct_from_json(kv, label="kv"), ec_transfer_params=struct_from_json(ec, label="ec")
    )
    extra = accept(kv=both).params["extra_args"]
    assert {"kv_transfer_params": kv, "ec_transfer_params": ec} == extra
    assert isinstance(extra["kv_transfer_params"]["port"], int)
    both.kv_transfer_params = struct_from_json({"do_remote_prefill": True}, label="kv")
    assert {"kv_transfer_params": {"do_remote_prefill": True}} == accept(kv=both).params["extra_args"]


CONSTRAINTS = [
    (DecodingParameters(json='{"type": "object"}'), {"json": '{"type": "object"}'}),
    (DecodingParameters(choice=DecodingParametersStringChoices(choices=["a"])), {"choice": ["a"]}),
    (DecodingParameters(grammar="root ::= 'a'"), {"grammar": "root ::= 'a'"}),
    (DecodingParameters(structural_tag="{}"), {"structural_tag": "{}"}),
    (DecodingParameters(json_object=True), {"json_object": True}),
    (DecodingParameters(json_object=False), None),
    (DecodingParameters(), None),
]


@pytest.mark.parametrize(("decoding", "structured"), CONSTRAINTS)
def test_constraints(decoding: DecodingParameters, structured: dict[str, Any] | None) -> None:
    """Each arm of structured output reaches vLLM under its own name (FR-070)."""
    assert structured == accept(decoding=decoding).structured


REFUSALS = [
    (StatusCode.INVALID_ARGUMENT, "x-data-parallel-rank '-1'", {"metadata": {"x-data-parallel-rank": "-1"}}),
    (StatusCode.INVALID_ARGUMENT, "rank '1_0'", {"metadata": {"x-data-parallel-rank": "1_0"}}),
    (StatusCode.INVALID_ARGUMENT, "rank '4294967296'", {"metadata": {"x-data-parallel-rank": "4294967296"}}),
    (StatusCode.INVALID_ARGUMENT, r"rank 2 is not connected.*\[0, 1\]", {"metadata": {"x-data-parallel-rank": "2"}}),
    (StatusCode.NOT_FOUND, "'other' is not served; served is 'tiny', 'small'", {"model": "other"}),
    (StatusCode.NOT_FOUND, "'poet' is not served", {"model": "poet"}),
    (StatusCode.INVALID_ARGUMENT, "no prompt", {"token_ids": None}),
    (StatusCode.INVALID_ARGUMENT, "token_ids is empty", {"token_ids": TokenIds()}),
    (StatusCode.INVALID_ARGUMENT, "token id 100 is out of range", {"token_ids": TokenIds(ids=[100])}),
    (StatusCode.INVALID_ARGUMENT, "num_sequences 2", {"sampling": RandomSampling(num_sequences=2)}),
    (StatusCode.INVALID_ARGUMENT, "json is not JSON", {"decoding": DecodingParameters(json="{")}),
    (StatusCode.INVALID_ARGUMENT, "NUL", {"decoding": DecodingParameters(regex="a\0")}),
    (StatusCode.INVALID_ARGUMENT, "choice", {"decoding": DecodingParameters(choice=DecodingParametersStringChoices())}),
    (StatusCode.INVALID_ARGUMENT, "grammar is empty", {"decoding": DecodingParameters(grammar=" ")}),
    (StatusCode.INVALID_ARGUMENT, "structural_tag is empty", {"decoding": DecodingParameters(structural_tag="")}),
    (StatusCode.NOT_FOUND, "'nobody' is not loaded", {"lora_name": "nobody"}),
    (StatusCode.FAILED_PRECONDITION, "--enable-lora", {"lora_name": "poet", "engine": facts()}),
    (StatusCode.INVALID_ARGUMENT, "does not support media", {"media": [MediaItem()]}),
    (StatusCode.INVALID_ARGUMENT, "not text", {"media": [MediaItem()], "text": "a", "token_ids": None}),
    (StatusCode.INVALID_ARGUMENT, "truncate_prompt_tokens 65", {"truncate_prompt_tokens": 65}),
    (StatusCode.INVALID_ARGUMENT, "leave no room", {"token_ids": TokenIds(ids=[1] * 64)}),
    (StatusCode.INVALID_ARGUMENT, "11 .* max_new_tokens 10", {
        "stopping": StoppingCriteria(max_new_tokens=10, min_new_tokens=11)
    }),
    (StatusCode.INVALID_ARGUMENT, "budget -2", {"stopping": StoppingCriteria(thinking_token_budget=-2)}),
    (StatusCode.INVALID_ARGUMENT, "empty string", {"stopping": StoppingCriteria(stop_strings=["a", ""])}),
    (StatusCode.INVALID_ARGUMENT, "stop_token_ids holds token id 100", {
        "stopping": StoppingCriteria(stop_token_ids=[100])
    }),
    (StatusCode.INVALID_ARGUMENT, "temperature 2.5", {"temperature": 2.5}),
    (StatusCode.INVALID_ARGUMENT, "temperature nan", {"temperature": math.nan}),
    (StatusCode.INVALID_ARGUMENT, "top_p 0", {"sampling": RandomSampling(top_p=0.0)}),
    (StatusCode.INVALID_ARGUMENT, "min_p 1.5", {"sampling": RandomSampling(min_p=1.5)}),
    (StatusCode.INVALID_ARGUMENT, "presence_penalty", {"decoding": DecodingParameters(presence_penalty=2.5)}),
    (StatusCode.INVALID_ARGUMENT, "repetition_penalty", {"decoding": DecodingParameters(repetition_penalty=-1.0)}),
    (StatusCode.INVALID_ARGUMENT, "logit_bias holds token id", {"decoding": DecodingParameters(logit_bias={100: 1.0})}),
    (StatusCode.INVALID_ARGUMENT, "NaN", {"decoding": DecodingParameters(logit_bias={1: math.nan})}),
    (StatusCode.INVALID_ARGUMENT, "allowed_token_ids", {"decoding": DecodingParameters(allowed_token_ids=[90])}),
    (StatusCode.INVALID_ARGUMENT, "empty sequence", {
        "decoding": DecodingParameters(bad_words_token_ids=[TokenIds()])
    }),
    (StatusCode.INVALID_ARGUMENT, "129 sequences", {
        "decoding": DecodingParameters(bad_words_token_ids=[TokenIds(ids=[1])] * 129)
    }),
    (StatusCode.INVALID_ARGUMENT, "1025 token ids", {
        "decoding": DecodingParameters(bad_words_token_ids=[TokenIds(ids=[1] * 1025)])
    }),
    (StatusCode.INVALID_ARGUMENT, "129 characters", {"kv": KvCacheParameters(cache_salt="s" * 129)}),
    (StatusCode.INVALID_ARGUMENT, "not allowed", {"kv": KvCacheParameters(cache_salt="a/b")}),
    (StatusCode.INVALID_ARGUMENT, "129 ids", {"response": ResponseOptions(
        output_logprobs=True, output_candidates=CandidateTokens(token_ids=TokenIds(ids=[1] * 129))
    )}),
    (StatusCode.INVALID_ARGUMENT, "top_n 2147483648", {"response": ResponseOptions(
        output_logprobs=True, output_candidates=CandidateTokens(top_n=2**31)
    )}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "words", "fields"), REFUSALS, ids=[words for _, words, _ in REFUSALS])
def test_refusals(status: StatusCode, words: str, fields: dict[str, Any]) -> None:
    """Each row of the table of errors: the status, and a message that names field and value."""
    refused(status, words, **fields)


def test_the_order_of_checks() -> None:
    """The rank comes before the model, that before the prompt, that before the adapter, that before the numbers."""
    everything: dict[str, Any] = {
        "metadata": {"x-data-parallel-rank": "x"},
        "model": "other",
        "token_ids": None,
        "lora_name": "nobody",
        "temperature": 9.0,
    }
    repaired: dict[str, Any] = {"token_ids": TokenIds(ids=[1]), "metadata": {}}
    for field, words in (
        ("metadata", "x-data"),
        ("model", "'other'"),
        ("token_ids", "no prompt"),
        ("lora_name", "nobody"),
        ("temperature", "temperature"),
    ):
        with pytest.raises(RpcError, match=words):
            accept(**everything)
        everything.pop(field)
        if field in repaired:
            everything[field] = repaired[field]
    assert [1] == accept(**everything).prompt
