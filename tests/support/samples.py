"""The standard requests, facts and answers that conversion tests start from (spec 0.3); every call builds a new one."""

from __future__ import annotations

from typing import Any

from trio_sidecar.convert.request import ModelFacts
from trio_sidecar.wire import (
    CandidateTokenInfo,
    CandidateTokenInfoTokenInfo,
    FinishInfo,
    FinishInfoFinishReason,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
)

PROMPT = [11, 22, 33]
IMAGES = ["data:image/png;base64,AAAA", "https://example.com/b.png"]
HANDOFF = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-0",
    "remote_host": "127.0.0.1",
    "remote_port": 20097,
    "remote_block_ids": [7, 8],
}
# MessagePack of one uint8 tensor of three values, and the same with another last value.
KWARGS = "gaxwaXhlbF92YWx1ZXOCpGRhdGGTpXVpbnQ4kQPHAwMBAgOlZmllbGSSp2JhdGNoZWSBq2tlZXBfb25fY3B1wg=="
OTHER_KWARGS = "gaxwaXhlbF92YWx1ZXOCpGRhdGGTpXVpbnQ4kQPHAwMBAgSlZmllbGSSp2JhdGNoZWSBq2tlZXBfb25fY3B1wg=="


def model_facts(**changes: Any) -> ModelFacts:
    """The discovered model of the fixtures."""
    facts: dict[str, Any] = {
        "served_model_name": "served-model",
        "base_names": frozenset({"model-source", "served-model", "model-alias"}),
        "reasoning_parser": "deepseek_r1",
        "supports_lora": True,
    }
    return ModelFacts(**{**facts, **changes})


def minimal_request(
    *,
    stop: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """Three tokens and nothing else, every absent field spelled out as Dynamo does."""
    return {
        "model": "served-model",
        "token_ids": list(PROMPT),
        "stop_conditions": {
            "max_tokens": None,
            "stop": None,
            "stop_token_ids": None,
            "stop_token_ids_visible": None,
            "stop_token_ids_hidden": None,
            "min_tokens": None,
            "ignore_eos": None,
            "max_thinking_tokens": None,
            **(stop or {}),
        },
        "sampling_options": {
            "n": None,
            "best_of": None,
            "presence_penalty": None,
            "frequency_penalty": None,
            "repetition_penalty": None,
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "min_p": None,
            "use_beam_search": None,
            "length_penalty": None,
            "seed": None,
            "include_stop_str_in_output": None,
            "guided_decoding": None,
            **(sampling or {}),
        },
        "output_options": {
            "logprobs": None,
            "prompt_logprobs": None,
            "skip_special_tokens": None,
            "formatted_prompt": None,
            "return_tokens_as_token_ids": None,
            **(output or {}),
        },
        "eos_token_ids": [2],
        "mdc_sum": "model-checksum",
        "annotations": [],
        "routing": routing or {},
        "router_config_override": None,
        **top,
    }


def rich_request(**top: Any) -> dict[str, Any]:
    """Every option that an aggregated text request may use, in one."""
    return minimal_request(
        stop={
            "max_tokens": 1,
            "min_tokens": 1,
            "stop": ["done"],
            "stop_token_ids_hidden": [2],
            "ignore_eos": True,
        },
        sampling={
            "temperature": 0.2,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 123,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.1,
            "include_stop_str_in_output": True,
            "guided_decoding": {"json": {"type": "object"}},
        },
        output={"logprobs": 1, "prompt_logprobs": 1},
        routing={"cache_namespace": "cache-salt"},
        **{
            "extra_args": {
                "nvext": {"cache_salt": "cache-salt", "token_in": True},
                "bypass_prefix_cache": True,
                "kv_transfer_params": {"connector_data": {"values": [1, True, None]}},
            },
            **top,
        },
    )


def multimodal_facts(**changes: Any) -> ModelFacts:
    """The same model, able to take media."""
    return model_facts(**{"supports_multimodal": True, **changes})


def decode_request(**top: Any) -> dict[str, Any]:
    """The rich request with a prefill worker's handoff."""
    return rich_request(**{"prefill_result": {"disaggregated_params": dict(HANDOFF)}, **top})


def media_request(**top: Any) -> dict[str, Any]:
    """The minimal request with two images."""
    return minimal_request(**{"multi_modal_data": {"image_url": [{"Url": url} for url in IMAGES]}, **top})


def features(**changes: Any) -> dict[str, Any]:
    """One prepared image; a change of None takes a member away."""
    members: dict[str, Any] = {
        "mm_hashes": {"image": ["producer-image-hash"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        "kwargs_data": {"image": [KWARGS]},
        **changes,
    }
    return {name: value for name, value in members.items() if value is not None}


def features_request(prepared: Any = None, *, extra: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The minimal request with prepared media in its envelope."""
    envelope = {"sampling_params": {}, "features": features() if prepared is None else prepared}
    return minimal_request(extra_args={"vllm_tito": envelope, **(extra or {})}, **top)


def tokens(
    *ids: int, text: str = "", scored: bool = False, finish: FinishInfo | None = None, **changes: Any
) -> GenerateResponse:
    """One token message; ``scored`` gives every token the logprobs of the fixtures, ``changes`` set any other field."""
    output = SequenceOutput(text=text, num_tokens=len(ids), token_ids=list(ids), finish_info=finish)
    if scored:
        output.logprobs = [-0.25] * len(ids)
        output.ranks = [1] * len(ids)
        output.candidate_tokens = [candidates((43, -0.5, 2)) for _ in ids]
    for name, value in changes.items():
        setattr(output, name, value)
    return GenerateResponse(outputs=output)


def candidates(*entries: tuple[int, float, int]) -> CandidateTokenInfo:
    """The alternatives at one position: id, logprob, rank."""
    return CandidateTokenInfo(
        tokens=[
            CandidateTokenInfoTokenInfo(id=token_id, logprob=logprob, rank=rank) for token_id, logprob, rank in entries
        ]
    )


def finished(count: int, reason: FinishInfoFinishReason = FinishInfoFinishReason.STOP, **changes: Any) -> FinishInfo:
    """The end of a request that produced so many tokens."""
    return FinishInfo(num_output_tokens=count, finish_reason=reason, **changes)


def prompt_info(count: int = len(PROMPT), **columns: Any) -> GenerateResponse:
    """The first message of a stream."""
    return GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=count, **columns))


ENVELOPE_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.85,
    "top_k": 7,
    "min_p": 0.05,
    "seed": 321,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop_token_ids": [42, 43],
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
}
"""Every sampling parameter that a legacy envelope hydrates (R7.64)."""
