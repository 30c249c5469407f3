"""Dynamo's request dict to a ``GenerateRequest`` (spec 7).

Everything that would be lost or misread is refused here, before any call. The checks run in the order of R7.11, because
only the first failure is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert import extras as extra_rules
from trio_sidecar.convert import legacy, sampling
from trio_sidecar.convert.fields import MAX_INT32, MIN_INT32, Section, check_text, describe
from trio_sidecar.convert.modes import RULES, ModeRules
from trio_sidecar.convert.struct import struct_from_json
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import GenerateRequest, KvCacheParameters, TokenIds
from trio_sidecar.wire.methods import RANK_METADATA_KEY

__all__ = ["ConvertedRequest", "ModelFacts", "ResponseOptionsState", "convert_request"]


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What discovery knows about the model that requests are converted for.

    Attributes:
        served_model_name: Goes into every request, whatever the caller asked for.
        base_names: Model id, served name and aliases: names that mean the base model.
        reasoning_parser: The engine's own reasoning parser; blank if it has none.
        supports_lora: The model takes adapters and there is room for at least one.
        supports_multimodal: The model takes media.
        mode: This worker's role.
    """

    served_model_name: str
    base_names: frozenset[str] = frozenset()
    reasoning_parser: str = ""
    supports_lora: bool = False
    supports_multimodal: bool = False
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED


@attrs.frozen(kw_only=True)
class ResponseOptionsState:
    """What of a request matters for reading its answers.

    Attributes:
        prompt_tokens: Number of prompt tokens that were sent.
        logprobs: How many alternatives were asked for; None for no logprobs, 0 for the selected token's only.
        prompt_logprobs: The same for the prompt.
        user_stop_ids: Stop ids that the user chose; a stop at one of them is reported.
        hidden_stop_ids: Stop ids that the model brings; a stop at one of them is not.
        mode: This worker's role.
    """

    prompt_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    user_stop_ids: frozenset[int] = frozenset()
    hidden_stop_ids: frozenset[int] = frozenset()
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED


@attrs.frozen(kw_only=True)
class ConvertedRequest:
    """A request, ready to be sent.

    Attributes:
        wire: The message.
        metadata: Request metadata, the data-parallel rank if there is one.
        response: What the response converter needs to know.
    """

    wire: GenerateRequest
    metadata: dict[str, str]
    response: ResponseOptionsState


@attrs.frozen(kw_only=True)
class _View:
    """The request, split into its sections and with the legacy envelope already worked in."""

    top: Section
    stop: Section
    sampling: Section
    output: Section
    routing: Section
    extra_args: object
    envelope: legacy.Envelope | None


def convert_request(request: Mapping[str, object], *, request_id: str, model: ModelFacts) -> ConvertedRequest:
    """Convert one request.

    Args:
        request: Dynamo's preprocessed request; absent values are None or missing.
        request_id: Goes out verbatim.
        model: What discovery found.

    Raises:
        InvalidRequest: Something is malformed, or cannot be expressed; the message names the field, the value and what
            is allowed.
    """
    rules = RULES[model.mode]
    if not rules.supported:
        reason = f"requests in {model.mode.value} mode are not supported; allowed is agg"
        raise InvalidRequest(reason)
    top = Section(request)
    _refuse_media(top, model)
    view = _read(top, model)
    token_ids = _prompt(top)
    _refuse_unsupported(view, rules)
    _refuse_preprocessed_media(view, rules)
    namespace = extra_rules.cache_namespace(view.routing)
    extra_args = _extra_args(view)
    extra_rules.check_nvext(extra_args, namespace)
    extras = extra_rules.read_extras(extra_args, view.envelope)
    kv = KvCacheParameters(
        bypass_prefix_cache=extras.bypass_prefix_cache,
        cache_salt=extra_rules.cache_salt(namespace),
        kv_transfer_params=struct_from_json(extras.kv_transfer_params, label="kv_transfer_params")
        if extras.has_kv
        else None,
    )
    encoder_result = top.get("encoder_result")
    if encoder_result is not None:
        if not isinstance(encoder_result, Mapping):
            reason = "encoder_result"
            raise top.refuse(reason, "a JSON object")
        kv.ec_transfer_params = struct_from_json(encoder_result, label="ec_transfer_params")
    sampling.check_top_k_sign(view.sampling)
    return _assemble(view, rules, token_ids, kv, request_id=request_id, model=model)


def _read(top: Section, model: ModelFacts) -> _View:
    extra_args = extra_rules.without_reasoning_hints(top.get("extra_args"), model.reasoning_parser)
    # Users know these fields by their own names, so messages leave the name of the section out.
    stop = top.section("stop_conditions", path="")
    options = top.section("sampling_options", path="")
    output = top.section("output_options", path="")
    envelope = legacy.read_envelope(extra_args)
    if envelope is not None:
        stop, options, output = legacy.hydrate(envelope, stop, options, output)
    return _View(
        top=top,
        stop=stop,
        sampling=options,
        output=output,
        routing=top.section("routing"),
        extra_args=extra_args,
        envelope=envelope,
    )


def _prompt(top: Section) -> list[int]:
    token_ids = top.uint32s("token_ids")
    if not token_ids:
        reason = "token_ids must hold at least one token id, got none"
        raise InvalidRequest(reason)
    return token_ids


def _refuse_media(top: Section, model: ModelFacts) -> None:
    media = top.section("multi_modal_data").values
    if not any(media.values()):
        return
    if not model.supports_multimodal:
        reason = f"multi_modal_data: model '{model.served_model_name}' does not advertise multimodal support"
        raise InvalidRequest(reason)
    reason = "multi_modal_data is not supported yet; allowed are requests that hold text only"
    raise InvalidRequest(reason)


def _refuse_unsupported(view: _View, rules: ModeRules) -> None:
    """Refuse what the protocol cannot express (spec 7.5)."""
    top = view.top
    if top.get("prompt_embeds") is not None:
        reason = "prompt_embeds: prompt embeddings are not supported; allowed are token ids"
        raise InvalidRequest(reason)
    if top.get("mm_processor_kwargs") is not None:
        reason = "mm_processor_kwargs is not supported; it must be absent"
        raise InvalidRequest(reason)
    if top.get("bootstrap_info") is not None:
        reason = "bootstrap_info: a bootstrap handoff is not supported; it must be absent"
        raise InvalidRequest(reason)
    if view.stop.uint32s("stop_token_ids_visible"):
        reason = "stop_token_ids_visible: visible stop ids are not supported; it must be absent or empty"
        raise InvalidRequest(reason)
    if view.stop.get("max_thinking_tokens") is not None:
        budget = describe(view.stop.get("max_thinking_tokens"))
        reason = f"max_thinking_tokens is not supported; it must be absent, got {budget}"
        raise InvalidRequest(reason)
    sampling.check_sampling(view.sampling)
    if not rules.zero_disables:
        sampling.check_zero_disables(view.sampling)
    sampling.check_length_penalty(view.sampling)
    if any(top.section("multi_modal_uuids").values.values()):
        reason = "multi_modal_uuids must come with media, got some without multi_modal_data"
        raise InvalidRequest(reason)


def _refuse_preprocessed_media(view: _View, rules: ModeRules) -> None:
    if view.envelope is not None:
        if rules.envelope_whitelist:
            legacy.check_sampling_keys(view.envelope)
        legacy.check_members(view.envelope)
        if view.envelope.members.get("features") is not None:
            name = view.envelope.members.name("features")
            reason = f"{name} is not supported yet; allowed are requests that hold text only"
            raise InvalidRequest(reason)


def _extra_args(view: _View) -> Mapping[str, object]:
    if view.extra_args is None:
        return {}
    if not isinstance(view.extra_args, Mapping):
        reason = f"extra_args must be a JSON object, got {describe(view.extra_args)}"
        raise InvalidRequest(reason)
    return view.extra_args


def _assemble(
    view: _View, rules: ModeRules, token_ids: list[int], kv: KvCacheParameters, *, request_id: str, model: ModelFacts
) -> ConvertedRequest:
    user_stops = frozenset(view.stop.uint32s("stop_token_ids") or ())
    hidden_stops = frozenset(view.stop.uint32s("stop_token_ids_hidden") or ())
    wire = GenerateRequest(
        request_id=check_text(request_id, "request_id"),
        model=model.served_model_name,
        token_ids=TokenIds(ids=token_ids),
        temperature=sampling.temperature(view.sampling),
        sampling=sampling.random_sampling(view.sampling),
        decoding=sampling.decoding_parameters(view.sampling),
        stopping=sampling.stopping_criteria(
            view.stop, view.sampling, user_stops | hidden_stops, one_token=not rules.generates
        ),
        response=sampling.response_options(view.output),
        kv=kv,
        priority=_priority(view.routing),
        lora_name=_lora_name(view.routing, model),
    )
    return ConvertedRequest(
        wire=wire,
        metadata=_metadata(view.routing, rules),
        response=ResponseOptionsState(
            prompt_tokens=len(token_ids),
            logprobs=view.output.uint32("logprobs"),
            prompt_logprobs=view.output.uint32("prompt_logprobs"),
            user_stop_ids=user_stops,
            hidden_stop_ids=hidden_stops,
            mode=model.mode,
        ),
    )


def _priority(routing: Section) -> int:
    """Dynamo's higher-is-better turned into vLLM's lower-is-earlier; the lowest int32 has no negation (R7.19)."""
    priority = routing.int32("priority") or 0
    return MAX_INT32 if priority == MIN_INT32 else -priority


def _lora_name(routing: Section, model: ModelFacts) -> str:
    """The adapter to use; a base name means none (R7.75 to R7.77)."""
    name = routing.text("lora_name") or ""
    if not name or name == model.served_model_name or name in model.base_names:
        return ""
    if not model.supports_lora:
        reason = f"{routing.name('lora_name')}: the engine did not advertise LoRA support, got '{name}'"
        raise InvalidRequest(reason)
    return name


def _metadata(routing: Section, rules: ModeRules) -> dict[str, str]:
    for key in rules.rank_source.value:
        rank = routing.uint32(key)
        if rank is not None:
            return {RANK_METADATA_KEY: str(rank)}
    return {}
