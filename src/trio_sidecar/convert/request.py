"""Dynamo's request dict to a ``GenerateRequest`` (spec 7).

Everything that would be lost or misread is refused here, before any call. The checks run in the order of R7.11, because
only the first failure is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert import extras as extra_rules
from trio_sidecar.convert import handoff, legacy, media, sampling
from trio_sidecar.convert.features import ROUTING_HASHES, read_features, read_routing_hashes
from trio_sidecar.convert.fields import MAX_INT32, MIN_INT32, Section, check_text, describe
from trio_sidecar.convert.modes import RULES, ModeRules
from trio_sidecar.errors import InvalidRequest
from trio_sidecar.wire import GenerateRequest, KvCacheParameters, MediaItem, TokenIds
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
        caller_handoff: Whether a caller may bring KV transfer parameters of its own.
    """

    served_model_name: str
    base_names: frozenset[str] = frozenset()
    reasoning_parser: str = ""
    supports_lora: bool = False
    supports_multimodal: bool = False
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    caller_handoff: bool = True


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
        expands_prompt: The engine expands raw media in the prompt and so counts more tokens than were sent (R8.29);
            prepared media are expanded already (R8.31).
    """

    prompt_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    user_stop_ids: frozenset[int] = frozenset()
    hidden_stop_ids: frozenset[int] = frozenset()
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    expands_prompt: bool = False


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
    top = Section(request)
    raw = media.raw_media(top)
    if raw and not model.supports_multimodal:
        reason = f"multi_modal_data: model '{model.served_model_name}' does not advertise multimodal support"
        raise InvalidRequest(reason)
    view = _read(top, model)
    token_ids = _prompt(top)
    prepared = view.envelope is not None and view.envelope.features is not None
    has_media = bool(raw) or prepared
    _refuse_unsupported(view, rules, has_media=has_media)
    media.check_uuid_keys(top, has_media=bool(raw))
    items = _media(view, rules, raw, len(token_ids))
    namespace = extra_rules.cache_namespace(view.routing)
    extra_args = _extra_args(view)
    extra_rules.check_nvext(extra_args, namespace)
    extras = extra_rules.read_extras(extra_args, view.envelope, has_media=has_media)
    if not model.caller_handoff:
        handoff.refuse_callers(extras, rules)
    kv = KvCacheParameters(
        bypass_prefix_cache=extras.bypass_prefix_cache,
        cache_salt=extra_rules.cache_salt(namespace),
        kv_transfer_params=handoff.kv_transfer_params(top, extras, rules, has_media=has_media),
        ec_transfer_params=handoff.ec_transfer_params(top, rules),
    )
    sampling.check_top_k_sign(view.sampling)
    wire = _wire(view, rules, token_ids, kv, items)
    wire.request_id = check_text(request_id, "request_id")
    wire.model = model.served_model_name
    wire.lora_name = _lora_name(view.routing, model)
    return ConvertedRequest(
        wire=wire,
        metadata=_metadata(view.routing, rules),
        response=ResponseOptionsState(
            prompt_tokens=len(token_ids),
            logprobs=view.output.uint32("logprobs"),
            prompt_logprobs=view.output.uint32("prompt_logprobs"),
            user_stop_ids=_stop_ids(view, "stop_token_ids"),
            hidden_stop_ids=_stop_ids(view, "stop_token_ids_hidden"),
            mode=model.mode,
            expands_prompt=bool(raw),
        ),
    )


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


def _refuse_unsupported(view: _View, rules: ModeRules, *, has_media: bool) -> None:
    """Refuse what the protocol cannot express (spec 7.5)."""
    top = view.top
    if top.get("prompt_embeds") is not None:
        reason = "prompt_embeds: prompt embeddings are not supported; allowed are token ids"
        raise InvalidRequest(reason)
    if top.get("mm_processor_kwargs") is not None:
        reason = "mm_processor_kwargs is not supported; it must be absent"
        raise InvalidRequest(reason)
    if rules.media_only and not has_media:
        reason = f"multi_modal_data is required in encode mode: {' or '.join(rules.media_only)} media"
        raise InvalidRequest(reason)
    if top.get("encoder_result") is not None and not rules.takes_encoder_result:
        reason = "encoder_result must be absent in encode mode, which makes it"
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


def _media(view: _View, rules: ModeRules, raw: media.RawMedia, prompt_tokens: int) -> list[MediaItem]:
    """The media items, raw or prepared, and the checks around them."""
    envelope = view.envelope
    if envelope is not None and rules.envelope_whitelist:
        legacy.check_sampling_keys(envelope)
    if raw and envelope is not None and envelope.features is not None:
        reason = f"multi_modal_data and {envelope.members.name(legacy.FEATURES)} cannot be mixed in one request"
        raise InvalidRequest(reason)
    items = media.raw_media_items(raw, view.top, view.extra_args)
    prepared = None
    if envelope is not None:
        legacy.check_members(envelope)
        if envelope.features is not None:
            prepared = read_features(envelope.features, envelope.members.name(legacy.FEATURES))
    routing_hashes = read_routing_hashes(view.extra_args)
    if prepared is not None:
        # Scoped by the adapter that the router saw, even where the name means the base model (R7.60).
        lora_name = view.routing.text("lora_name") or ""
        items = prepared.items(prompt_tokens=prompt_tokens, routing_hashes=routing_hashes, lora_name=lora_name)
    elif routing_hashes is not None:
        reason = f"extra_args.{ROUTING_HASHES} requires preprocessed multimodal features, got none"
        raise InvalidRequest(reason)
    allowed = [media.MODALITIES[name] for name in rules.media_only]
    if allowed and any(item.modality not in allowed for item in items):
        reason = f"encode mode takes {' and '.join(rules.media_only)} media only"
        raise InvalidRequest(reason)
    return items


def _extra_args(view: _View) -> Mapping[str, object]:
    if view.extra_args is None:
        return {}
    if not isinstance(view.extra_args, Mapping):
        reason = f"extra_args must be a JSON object, got {describe(view.extra_args)}"
        raise InvalidRequest(reason)
    return view.extra_args


def _wire(
    view: _View, rules: ModeRules, token_ids: list[int], kv: KvCacheParameters, items: list[MediaItem]
) -> GenerateRequest:
    stop_ids = _stop_ids(view, "stop_token_ids") | _stop_ids(view, "stop_token_ids_hidden")
    return GenerateRequest(
        token_ids=TokenIds(ids=token_ids),
        temperature=sampling.temperature(view.sampling),
        sampling=sampling.random_sampling(view.sampling),
        decoding=sampling.decoding_parameters(view.sampling),
        stopping=sampling.stopping_criteria(view.stop, view.sampling, stop_ids, one_token=not rules.generates),
        response=sampling.response_options(view.output, prompt_ids=rules.prompt_ids_with_media and bool(items)),
        kv=kv,
        priority=_priority(view.routing),
        media=items,
    )


def _stop_ids(view: _View, key: str) -> frozenset[int]:
    return frozenset(view.stop.uint32s(key) or ())


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
