from __future__ import annotations

from typing import Any

import pytest

from support.conversion import convert, dig, refused, wire
from support.samples import ENVELOPE_SAMPLING, minimal_request, model_facts
from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.wire import CandidateTokens

MAX_UINT32 = 2**32 - 1


def enveloped(params: Any = None, *, members: Any = None, extra: Any = None, **changes: Any) -> dict[str, Any]:
    """A minimal request with a legacy envelope."""
    envelope = {"sampling_params": params or {}, **(members or {})}
    return minimal_request(extra_args={"vllm_tito": envelope, **(extra or {})}, **changes)


@pytest.mark.rule("R7.64", "R7.73")
def test_the_envelope_fills_every_absent_field() -> None:
    """An envelope with everything makes the same request as the typed fields would."""
    typed = minimal_request(
        sampling={key: ENVELOPE_SAMPLING[key] for key in list(ENVELOPE_SAMPLING)[:8]},
        stop={key: ENVELOPE_SAMPLING[key] for key in ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")},
        output={key: ENVELOPE_SAMPLING[key] for key in ("logprobs", "prompt_logprobs", "skip_special_tokens")},
    )
    assert convert(typed) == convert(enveloped({**ENVELOPE_SAMPLING, "return_token_ids": True}))


@pytest.mark.rule("R7.64")
def test_typed_values_win() -> None:
    """A typed value, also a zero, is never replaced; null in the envelope is absent."""
    request = enveloped(
        {**ENVELOPE_SAMPLING, "seed": None},
        sampling={"temperature": 0.4, "presence_penalty": 0.0},
        stop={"stop_token_ids": [7], "ignore_eos": False, "max_tokens": 0},
        output={"logprobs": 0, "skip_special_tokens": True},
    )
    converted = wire(request)
    assert 0.4 == converted.temperature
    assert 0.0 == dig(converted, "decoding.presence_penalty")
    assert [7] == dig(converted, "stopping.stop_token_ids")
    assert not dig(converted, "stopping.ignore_eos")
    assert 0 == dig(converted, "stopping.max_new_tokens")
    assert CandidateTokens(top_n=0) == dig(converted, "response.output_candidates")
    assert True is dig(converted, "response.skip_special_tokens")
    assert dig(converted, "sampling.seed") is None


@pytest.mark.rule("R7.65")
@pytest.mark.parametrize(
    ("stop", "sent"),
    [
        ({}, [42]),
        ({"stop_token_ids_hidden": [7]}, [7]),
        ({"stop_token_ids_hidden": []}, []),
        ({"stop_token_ids": []}, []),
    ],
    ids=str,
)
def test_stop_ids_are_filled_only_if_there_are_none_at_all(stop: dict[str, Any], sent: list[int]) -> None:
    """Any typed list, the hidden one included, keeps the envelope's out."""
    assert sent == dig(wire(enveloped({"stop_token_ids": [42]}, stop=stop)), "stopping.stop_token_ids")


@pytest.mark.rule("R7.66")
@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_logprob_counts(key: str) -> None:
    """Minus one means all, a count stays as it is, anything else is refused."""
    field = "response.output_candidates" if key == "logprobs" else "response.prompt_candidates"
    assert CandidateTokens(all=True) == dig(wire(enveloped({key: -1})), field)
    assert CandidateTokens(top_n=0) == dig(wire(enveloped({key: 0})), field)
    assert CandidateTokens(all=True) == dig(wire(enveloped({key: MAX_UINT32})), field)  # what all is in typed fields
    said = f"sampling_params.{key} exceeds u32: at most 4294967295, got 4294967296"
    assert said in refused(enveloped({key: MAX_UINT32 + 1}))
    for wrong in (-2, 1.5, "2", True):
        assert f"sampling_params.{key} must be -1 for all" in refused(enveloped({key: wrong}))


@pytest.mark.rule("R7.61", "R7.62", "R7.67", "R7.70", "R7.71")
@pytest.mark.parametrize(
    ("envelope", "named"),
    [
        ([], "extra_args.vllm_tito must be a JSON object, got an array"),
        (None, "extra_args.vllm_tito must be a JSON object, got null"),
        ({}, "extra_args.vllm_tito.sampling_params is required"),
        ({"sampling_params": []}, "extra_args.vllm_tito.sampling_params must be a JSON object, got an array"),
        (
            {"sampling_params": {}, "unknown": 1},
            (
                "extra_args.vllm_tito.unknown is not supported; allowed are cache_salt, features, kv_transfer_params, "
                "model, priority, request_id, sampling_params, stream, stream_options"
            ),
        ),
        ({"sampling_params": {}, "token_offsets": []}, "extra_args.vllm_tito.token_offsets must be null, got an array"),
        ({"sampling_params": {}, "return_token_ids": True}, "vllm_tito.return_token_ids must be null, got true"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature must be a number"),
        ({"sampling_params": {"top_k": 1.5}}, "sampling_params.top_k must be an integer"),
        ({"sampling_params": {"seed": True}}, "sampling_params.seed must be an integer"),
        ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens must be an integer from 0"),
        ({"sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos must be a boolean"),
        ({"sampling_params": {"skip_special_tokens": "no"}}, "sampling_params.skip_special_tokens must be a boolean"),
        ({"sampling_params": {"stop_token_ids": 1}}, "sampling_params.stop_token_ids must be an array"),
        ({"sampling_params": {"return_token_ids": False}}, "return_token_ids must be true"),
        ({"sampling_params": {"return_token_ids": 1}}, "sampling_params.return_token_ids must be a boolean"),
        ({"sampling_params": {"logit_bias": {"42": 1.0}}}, "sampling_params.logit_bias is not supported"),
        ({"sampling_params": {"skip_reading_prefix_cache": 1}}, "skip_reading_prefix_cache must be a boolean"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused_envelopes(envelope: object, named: str) -> None:
    """What is malformed or would be lost is refused, and the member is named."""
    assert named in refused(minimal_request(extra_args={"vllm_tito": envelope}))


@pytest.mark.rule("R7.62", "R7.63", "R7.70")
def test_ignored_members_change_nothing() -> None:
    """Members that repeat what the request says elsewhere, and nulls, are accepted and ignored."""
    members = {
        "request_id": "other",
        "model": "other",
        "stream": True,
        "stream_options": {},
        "cache_salt": "x",
        "priority": 5,
        "features": None,
        "assistant_tokens_mask": None,
        "token_offsets": None,
        "content_parts": None,
        "return_token_ids": None,
        "ec_transfer_params": None,
        "kv_transfer_params": None,
    }
    params = {"return_token_ids": None, "logit_bias": None}
    assert wire(minimal_request()) == wire(enveloped(params, members=members))


@pytest.mark.rule("R7.68")
def test_the_canonical_handoff_wins() -> None:
    """The envelope's payload is used only where extra_args has none."""
    legacy = {"kv_transfer_params": {"from": "legacy"}}
    for extra, expected in (({}, "legacy"), ({"kv_transfer_params": {"from": "canonical"}}, "canonical")):
        struct = dig(wire(enveloped(members=legacy, extra=extra)), "kv.kv_transfer_params")
        assert {"from": expected} == json_from_struct(struct, label="kv")  # type: ignore[arg-type]
    assert "kv_transfer_params must be a JSON object" in refused(enveloped(members={"kv_transfer_params": [1]}))


@pytest.mark.rule("R7.69")
@pytest.mark.parametrize(
    ("extra", "bypass"),
    [
        ({}, True),
        ({"skip_reading_prefix_cache": False}, False),
        ({"bypass_prefix_cache": False}, False),
        ({"bypass_prefix_cache": True, "skip_reading_prefix_cache": False}, True),
    ],
    ids=str,
)
def test_prefix_cache_bypass(extra: dict[str, Any], bypass: bool) -> None:
    """The envelope asks last, after both names outside of it."""
    assert bypass is dig(wire(enveloped({"skip_reading_prefix_cache": True}, extra=extra)), "kv.bypass_prefix_cache")


@pytest.mark.rule("R7.64")
@pytest.mark.parametrize(
    ("section", "key"), [("stop", "max_tokens"), ("sampling", "temperature"), ("output", "logprobs")]
)
def test_beside_an_envelope_typed_fields_keep_their_names(section: str, key: str) -> None:
    """A typed value that is not allowed is refused as the request's own, with and without an envelope."""
    wrong: dict[str, Any] = {section: {key: "wrong"}}
    assert refused(minimal_request(**wrong)) == refused(enveloped({"seed": 1}, **wrong))


@pytest.mark.rule("R7.4", "R7.64")
def test_filled_values_pass_the_same_checks() -> None:
    """A value from the envelope is checked like a typed one."""
    assert "top_k must be at least 1" in refused(enveloped({"top_k": 0}))
    assert "min_p must be above 0" in refused(enveloped({"min_p": 0.0}))


@pytest.mark.rule("R7.30")
def test_an_envelope_survives_dropped_reasoning_hints() -> None:
    """Dropping the hints for a reasoning parser leaves the envelope in force."""
    request = enveloped({"max_tokens": 9}, extra={"reasoning_ended": True})
    assert 9 == dig(wire(request, model_facts(reasoning_parser="")), "stopping.max_new_tokens")
