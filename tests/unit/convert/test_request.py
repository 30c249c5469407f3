from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from support.conversion import convert, dig, refused, shown, wire
from support.samples import PROMPT, minimal_request, model_facts, rich_request
from trio_sidecar.convert.request import convert_request
from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import (
    CandidateTokens,
    DecodingParameters,
    GenerateRequest,
    KvCacheParameters,
    RandomSampling,
    ResponseOptions,
    StoppingCriteria,
    TokenIds,
)

MAX_INT32, MAX_UINT32 = 2**31 - 1, 2**32 - 1


@pytest.mark.rule("R7.2")
def test_minimal_request() -> None:
    """Three tokens and no options make the request whose every other field is the wire's default."""
    expected = GenerateRequest(
        request_id="request-0",
        model="served-model",
        token_ids=TokenIds(ids=[11, 22, 33]),
        temperature=1.0,
        sampling=RandomSampling(num_sequences=1),
        decoding=DecodingParameters(),
        stopping=StoppingCriteria(),
        response=ResponseOptions(output_text=True, output_token_ids=True),
        kv=KvCacheParameters(),
    )
    converted = convert(minimal_request())
    assert expected == converted.wire
    assert {} == converted.metadata
    assert 3 == converted.response.prompt_tokens


def test_rich_request() -> None:
    """Every option of an aggregated text request arrives."""
    converted = wire(rich_request())
    assert 0.2 == converted.temperature
    assert RandomSampling(num_sequences=1, top_k=4, top_p=0.9, min_p=0.1, seed=123) == converted.sampling
    assert (
        DecodingParameters(
            presence_penalty=0.3, frequency_penalty=0.4, repetition_penalty=1.1, json='{"type":"object"}'
        )
        == converted.decoding
    )
    assert (
        StoppingCriteria(
            max_new_tokens=1,
            min_new_tokens=1,
            stop_token_ids=[2],
            stop_strings=["done"],
            include_stop_strings=True,
            ignore_eos=True,
        )
        == converted.stopping
    )
    assert (
        ResponseOptions(
            prompt_token_ids=True,
            prompt_logprobs=True,
            prompt_candidates=CandidateTokens(top_n=1),
            output_text=True,
            output_token_ids=True,
            output_logprobs=True,
            output_candidates=CandidateTokens(top_n=1),
        )
        == converted.response
    )
    assert converted.kv is not None
    assert "dynamo-cache-salt:cache-salt" == converted.kv.cache_salt
    assert converted.kv.bypass_prefix_cache
    assert converted.kv.kv_transfer_params is not None
    kv = json_from_struct(converted.kv.kv_transfer_params, label="kv_transfer_params")
    assert {"connector_data": {"values": [1, True, None]}} == kv


def test_conversion_leaves_the_request_alone() -> None:
    """Converting twice gives the same, and the caller's dict is as before."""
    request = rich_request()
    before = copy.deepcopy(request)
    assert wire(request) == wire(request)
    assert before == request


def test_sections_may_be_missing() -> None:
    """A dict with nothing but the prompt is a minimal request."""
    assert wire(minimal_request()) == wire({"token_ids": list(PROMPT)})


def test_the_served_name_replaces_what_the_caller_asked_for() -> None:
    """The model on the wire is the discovered one."""
    assert "served-model" == wire(minimal_request(model="something-else")).model


PRESENCE: list[tuple[str, str, str, Any, Any, list[tuple[Any, Any]]]] = [
    # section, key, wire path, wire value when absent, an explicit zero and what becomes of it, others
    ("sampling", "temperature", "temperature", 1.0, 0.0, [(0.2, 0.2), (1, 1.0)]),
    ("sampling", "top_p", "sampling.top_p", None, 0.0, [(0.9, 0.9)]),
    ("sampling", "seed", "sampling.seed", None, 0, [(123, 123), (-3, -3), (2**63 - 1, 2**63 - 1)]),
    ("sampling", "presence_penalty", "decoding.presence_penalty", 0.0, 0.0, [(0.3, 0.3), (-2.0, -2.0)]),
    ("sampling", "frequency_penalty", "decoding.frequency_penalty", 0.0, 0.0, [(0.4, 0.4)]),
    ("sampling", "repetition_penalty", "decoding.repetition_penalty", 0.0, 0.0, [(1.1, 1.1)]),
    ("sampling", "include_stop_str_in_output", "stopping.include_stop_strings", False, False, [(True, True)]),
    ("stop", "max_tokens", "stopping.max_new_tokens", 0, 0, [(8, 8), (MAX_UINT32, MAX_UINT32)]),
    ("stop", "min_tokens", "stopping.min_new_tokens", 0, 0, [(2, 2)]),
    ("stop", "ignore_eos", "stopping.ignore_eos", False, False, [(True, True)]),
    ("stop", "stop", "stopping.stop_strings", [], [], [(["done", "é"], ["done", "é"])]),
    ("output", "logprobs", "response.output_logprobs", False, True, []),
    ("output", "prompt_logprobs", "response.prompt_logprobs", False, True, []),
    ("output", "skip_special_tokens", "response.skip_special_tokens", None, False, [(True, True)]),
]


@pytest.mark.rule("7.2", "R7.1", "FR-068", "E10")
@pytest.mark.parametrize(("section", "key", "path", "absent", "zero", "others"), PRESENCE, ids=shown)
def test_absent_zero_and_other_values(
    section: str, key: str, path: str, absent: object, zero: object, others: list[tuple[object, object]]
) -> None:
    """Absent, an explicit zero, false or empty, and other values each arrive as the table says."""
    empty: object = {bool: False, list: [], float: 0.0, int: 0}[type(zero)]
    if section == "output" and key != "skip_special_tokens":
        empty = 0
    assert absent == dig(wire(minimal_request()), path)
    assert zero == dig(wire(minimal_request(**{section: {key: empty}})), path)
    for given, expected in others:
        assert expected == dig(wire(minimal_request(**{section: {key: given}})), path)


@pytest.mark.rule("7.2")
@pytest.mark.parametrize("count", [0, 2, 3])
def test_logprob_counts(count: int) -> None:
    """A count asks for the selected token's logprob and for that many candidates; 0 is a count."""
    response = wire(minimal_request(output={"logprobs": count})).response
    expected = ResponseOptions(
        output_text=True, output_token_ids=True, output_logprobs=True, output_candidates=CandidateTokens(top_n=count)
    )
    assert expected == response
    response = wire(minimal_request(output={"prompt_logprobs": count})).response
    expected = ResponseOptions(
        prompt_token_ids=True,
        prompt_logprobs=True,
        prompt_candidates=CandidateTokens(top_n=count),
        output_text=True,
        output_token_ids=True,
    )
    assert expected == response


@pytest.mark.rule("R7.6", "R7.7", "FR-054")
@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_logprob_count_limits(key: str) -> None:
    """The largest uint32 means all candidates; between that and int32 a count cannot be expressed."""
    field = "output_candidates" if key == "logprobs" else "prompt_candidates"
    assert CandidateTokens(all=True) == dig(wire(minimal_request(output={key: MAX_UINT32})), f"response.{field}")
    assert CandidateTokens(top_n=MAX_INT32) == dig(wire(minimal_request(output={key: MAX_INT32})), f"response.{field}")
    for count in (MAX_INT32 + 1, MAX_UINT32 - 1):
        message = refused(minimal_request(output={key: count}))
        assert f"{key} must fit in i32" in message
        assert str(count) in message


@pytest.mark.rule("7.2", "R7.3", "R7.4")
def test_top_k_and_min_p() -> None:
    """Positive values arrive; what switches the filter off is refused, because the wire cannot say it."""
    assert wire(minimal_request()).sampling == RandomSampling(num_sequences=1)
    assert 7 == dig(wire(minimal_request(sampling={"top_k": 7})), "sampling.top_k")
    assert MAX_INT32 == dig(wire(minimal_request(sampling={"top_k": MAX_INT32})), "sampling.top_k")
    assert 0.1 == dig(wire(minimal_request(sampling={"min_p": 0.1})), "sampling.min_p")
    for top_k in (-2, -1, 0, -(2**31)):
        message = refused(minimal_request(sampling={"top_k": top_k}))
        assert "top_k must be" in message
        assert str(top_k) in message
    for min_p in (0.0, -0.0, 0):
        assert "min_p must be above 0" in refused(minimal_request(sampling={"min_p": min_p}))


@pytest.mark.rule("R7.9")
def test_stop_ids_are_united() -> None:
    """Visible-to-engine and hidden ids go out sorted and once each; the response side still tells them apart."""
    converted = convert(minimal_request(stop={"stop_token_ids": [3, 2, 3], "stop_token_ids_hidden": [2, 4]}))
    assert [2, 3, 4] == dig(converted.wire, "stopping.stop_token_ids")
    assert frozenset({2, 3}) == converted.response.user_stop_ids
    assert frozenset({2, 4}) == converted.response.hidden_stop_ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": []}, "token_ids must hold at least one"),
        ({"token_ids": None}, "token_ids must hold at least one"),
        ({"token_ids": [1, 2**32]}, "token_ids[1] must be an integer from 0 to"),
        ({"sampling": {"n": 2}}, "n must be 1, got 2"),
        ({"sampling": {"n": 0}}, "n must be 1, got 0"),
        ({"sampling": {"best_of": 2}}, "best_of must be 1, got 2"),
        (
            {"sampling": {"use_beam_search": True}},
            "use_beam_search must be false, got true: beam search is not supported",
        ),
        ({"sampling": {"length_penalty": 0.5}}, "length_penalty must be 1.0, got 0.5"),
        ({"prompt_embeds": "encoded"}, "prompt_embeds: prompt embeddings are not supported; allowed are token ids"),
        ({"stop": {"max_thinking_tokens": 5}}, "max_thinking_tokens is not supported; it must be absent, got 5"),
        ({"stop": {"max_thinking_tokens": 0}}, "max_thinking_tokens is not supported; it must be absent, got 0"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs is not supported; it must be absent"),
        (
            {"bootstrap_info": {"bootstrap_host": "h"}},
            "bootstrap_info: a bootstrap handoff is not supported; it must be absent",
        ),
        (
            {"multi_modal_uuids": {"image_url": ["image-a"]}},
            "multi_modal_uuids must come with media, got some without multi_modal_data",
        ),
        (
            {"stop": {"stop_token_ids_visible": [42]}},
            "stop_token_ids_visible: visible stop ids are not supported; it must be absent or empty",
        ),
        ({"sampling": {"min_p": 0.0}}, "min_p must be above 0, got 0: vLLM gRPC cannot switch it off for one request"),
        ({"encoder_result": []}, "encoder_result must be a JSON object, got an array"),
        ({"sampling": {"temperature": math.nan}}, "temperature must be a finite number within the range of float32"),
        ({"sampling": {"temperature": "hot"}}, "temperature must be a number, got the text 'hot'"),
        ({"sampling": {"seed": 2**63}}, "seed must be an integer from"),
        ({"sampling": {"presence_penalty": math.inf}}, "presence_penalty must be a finite number"),
        ({"stop": {"max_tokens": -1}}, "max_tokens must be an integer from 0 to 4294967295, got -1"),
        ({"stop": {"max_tokens": 2**32}}, "max_tokens must be an integer from 0 to 4294967295"),
        ({"stop": {"stop": ["\ud800"]}}, "stop[0] must be valid Unicode"),
        ({"stop": {"stop": "done"}}, "stop must be an array"),
        ({"stop": {"stop_token_ids": [-1]}}, "stop_token_ids[0] must be an integer from 0 to"),
        ({"output": {"logprobs": -1}}, "logprobs must be an integer from 0 to"),
        ({"output": {"skip_special_tokens": 0}}, "skip_special_tokens must be a boolean, got 0"),
        ({"routing": {"priority": 2**31}}, "routing.priority must be an integer from"),
        ({"routing": {"dp_rank": -1}}, "routing.dp_rank must be an integer from"),
        ({"routing": {"lora_name": 1}}, "routing.lora_name must be a string"),
        ({"stop_conditions": []}, "stop_conditions must be a JSON object"),
    ],
    ids=shown,
)
@pytest.mark.rule("7.5", "R7.10", "R7.36", "E8", "E9")
def test_refusals_name_the_field(changes: dict[str, Any], named: str) -> None:
    """What cannot be expressed, or would break the encoding, is refused with field, value and what is allowed."""
    request = {**minimal_request(), **changes} if "stop_conditions" in changes else minimal_request(**changes)
    assert refused(request).startswith(f"InvalidRequest: {named}")


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}},
        {"sampling": {"length_penalty": 1.0 + 2**-24}},
        {"sampling": {"length_penalty": 1.0 + 2**-23}},
        {"stop": {"stop_token_ids_visible": []}},
        {"multi_modal_uuids": {"image_url": []}, "multi_modal_data": {"image_url": []}},
        {"multi_modal_uuids": {}},
        {"extra_args": {}},
    ],
    ids=shown,
)
@pytest.mark.rule("7.5", "R7.10")
def test_neutral_values_pass(changes: dict[str, Any]) -> None:
    """Controls that ask for what happens anyway change nothing."""
    assert wire(minimal_request()) == wire(minimal_request(**changes))


ORDERED_FAULTS: list[dict[str, Any]] = [
    {"extra_args.vllm_tito": []},
    {"token_ids": []},
    {"prompt_embeds": "x"},
    {"mm_processor_kwargs": {}},
    {"bootstrap_info": {}},
    {"stop_conditions.stop_token_ids_visible": [1]},
    {"stop_conditions.max_thinking_tokens": 0},
    {"sampling_options.n": 2},
    {"sampling_options.best_of": 2},
    {"sampling_options.use_beam_search": True},
    {"sampling_options.top_k": 0},
    {"sampling_options.min_p": 0.0},
    {"sampling_options.length_penalty": 0.5},
    {"multi_modal_uuids": {"image_url": ["a"]}},
    {"extra_args.vllm_tito.sampling_params.return_token_ids": False},
    {"extra_args.vllm_tito.sampling_params.logit_bias": {}},
    {"extra_args.vllm_tito.unknown": 1},
    {"extra_args.nvext.token_in": False},
    {"extra_args.unknown": 1},
    {"extra_args.kv_transfer_params": []},
    {"sampling_options.top_k": -2},
    {"sampling_options.guided_decoding": {"backend": "x"}},
    {"output_options.logprobs": MAX_INT32 + 1},
]


def with_fault(request: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    ((path, value),) = fault.items()
    at = request
    *parents, last = path.split(".")
    for name in parents:
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
        if name == "vllm_tito":
            at.setdefault("sampling_params", {})
    at[last] = value
    return request


@pytest.mark.rule("R7.11")
@pytest.mark.parametrize("position", range(len(ORDERED_FAULTS) - 1))
def test_only_the_first_failure_shows(position: int) -> None:
    """Of two faults the one that is checked first is reported."""
    first, second = ORDERED_FAULTS[position : position + 2]
    if first.keys() & second.keys() or "extra_args.vllm_tito" in first:
        second = ORDERED_FAULTS[position + 2] if first.keys() & second.keys() else second
    alone = refused(with_fault(minimal_request(), first))
    assert alone == refused(with_fault(with_fault(minimal_request(), second), first))


@pytest.mark.rule("R7.15", "R7.16", "R7.17", "R7.18")
@pytest.mark.parametrize(
    ("routing", "salt"),
    [
        ({"cache_namespace": "cache-salt"}, "dynamo-cache-salt:cache-salt"),
        ({"cache_namespace": "dynamo-cache-salt:caller"}, "dynamo-cache-salt:dynamo-cache-salt:caller"),
        ({"cache_salt": "cache-salt"}, "dynamo-cache-salt:cache-salt"),
        ({"cache_salt": "a", "cache_namespace": "a"}, "dynamo-cache-salt:a"),
        ({"cache_salt": ""}, "dynamo-cache-salt:"),
        ({"cache_namespace": ""}, "dynamo-cache-salt:"),
        ({"cache_namespace": None}, ""),
        ({}, ""),
    ],
    ids=shown,
)
def test_cache_identity(routing: dict[str, Any], salt: str) -> None:
    """The namespace goes out with the router's prefix, always; without one the salt is empty, never the checksum."""
    assert salt == dig(wire(minimal_request(routing=routing)), "kv.cache_salt")


def test_two_cache_identities_must_agree() -> None:
    """Under both of its names the namespace must be the same."""
    message = refused(minimal_request(routing={"cache_salt": "a", "cache_namespace": "b"}))
    assert "routing.cache_salt must equal routing.cache_namespace" in message


@pytest.mark.rule("R7.19")
@pytest.mark.parametrize(
    ("given", "sent"),
    [(-7, 7), (7, -7), (0, 0), (None, 0), (-(2**31), MAX_INT32), (MAX_INT32, -MAX_INT32), (-(2**31) + 1, MAX_INT32)],
)
def test_priority_is_negated_without_overflow(given: int | None, sent: int) -> None:
    """Dynamo's higher-is-better becomes vLLM's lower-is-earlier; the lowest int32 saturates."""
    assert sent == wire(minimal_request(routing={"priority": given})).priority


@pytest.mark.rule("R7.37", "R7.38")
@pytest.mark.parametrize(
    ("routing", "metadata"),
    [
        ({"dp_rank": 1}, {"x-data-parallel-rank": "1"}),
        ({"dp_rank": 0}, {"x-data-parallel-rank": "0"}),
        ({"dp_rank": 5, "prefill_dp_rank": 3}, {"x-data-parallel-rank": "5"}),
        ({"prefill_dp_rank": 3}, {}),
        ({}, {}),
    ],
    ids=shown,
)
def test_rank_metadata(routing: dict[str, Any], metadata: dict[str, str]) -> None:
    """The rank goes out as decimal metadata, rank 0 included; without a rank there is none."""
    assert metadata == convert(minimal_request(routing=routing)).metadata


@pytest.mark.rule("R7.75", "R7.76")
@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("adapter-a", "adapter-a"),
        (None, ""),
        ("", ""),
        ("model-source", ""),
        ("served-model", ""),
        ("model-alias", ""),
    ],
)
def test_adapter_selection(name: str | None, sent: str) -> None:
    """An adapter goes out by name; a base name means no adapter."""
    assert sent == wire(minimal_request(routing={"lora_name": name})).lora_name


@pytest.mark.rule("R7.77")
def test_adapter_on_a_model_without_lora() -> None:
    """An adapter that the model cannot take is refused; a base name still passes."""
    model = model_facts(supports_lora=False)
    message = refused(minimal_request(routing={"lora_name": "adapter-a"}), model)
    said = "InvalidRequest: routing.lora_name: the engine did not advertise LoRA support, got 'adapter-a'"
    assert said == message
    for base in ("served-model", "", None):
        assert "" == wire(minimal_request(routing={"lora_name": base}), model).lora_name


def test_request_id_must_be_text_that_utf8_can_carry() -> None:
    """The id goes out verbatim, so it must fit the wire."""
    with pytest.raises(InvalidRequest, match="request_id must be valid Unicode"):
        convert_request(minimal_request(), request_id="\ud800", model=model_facts())
    assert (
        "zero-controls"
        == convert_request(minimal_request(), request_id="zero-controls", model=model_facts()).wire.request_id
    )
