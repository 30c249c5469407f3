"""What a worker registers as, in Dynamo's classes (spec 2.1, 6.2); no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.request import ModelFacts
from trio_sidecar.errors import IncompatibleEngine, InvalidConfig

if TYPE_CHECKING:
    from trio_sidecar.config import WorkerSettings
    from trio_sidecar.discovery import DiscoveredModel, Registration
    from trio_sidecar.worker.binding import Binding

MODE_FLAG = "--disaggregation-mode"

__all__ = [
    "check_registration",
    "check_suitable",
    "component_of",
    "engine_config",
    "model_facts",
    "registration",
    "worker_config",
]

log = structlog.get_logger("trio_sidecar.worker")

_COMPONENTS = {
    DisaggregationMode.PREFILL: "prefill",
    DisaggregationMode.DECODE: "backend",
    DisaggregationMode.ENCODE: "encode",
}
"""Roles with a component of their own, whatever is configured (spec 2.1).

Under one name, requests would skip prefill (FR-075).
"""


def component_of(settings: WorkerSettings) -> str:
    """The component that a worker registers under."""
    return _COMPONENTS.get(settings.disaggregation_mode, settings.component)


def check_suitable(settings: WorkerSettings, model: DiscoveredModel) -> None:
    """Refuse settings that do not go with the engine (R2.14 to R2.20).

    Raises:
        InvalidConfig: Names the setting, and what would help.
    """
    parsers = {
        "--dyn-tool-call-parser": settings.dyn_tool_call_parser,
        "--dyn-reasoning-parser": settings.dyn_reasoning_parser,
    }
    for flag, parser in parsers.items():
        if parser is not None and model.reasoning_parser.strip():
            reason = (
                f"{parser!r} cannot be used while the engine parses reasoning itself, with {model.reasoning_parser!r}; "
                "start the engine with --reasoning-parser none"
            )
            raise InvalidConfig(flag, reason)
    if settings.disaggregation_mode is DisaggregationMode.ENCODE and not model.supports_multimodal:
        reason = f"encode requires a multimodal engine; {model.served_model_name!r} is not one"
        raise InvalidConfig(MODE_FLAG, reason)


def worker_config(binding: Binding, settings: WorkerSettings, model: DiscoveredModel) -> Any:
    """Where and how to register: Dynamo's ``WorkerConfig``.

    Raises:
        InvalidConfig: The settings do not go with the engine.
    """
    check_suitable(settings, model)
    mode = settings.disaggregation_mode
    return binding.worker_config(
        namespace=settings.namespace,
        component=component_of(settings),
        endpoint=settings.endpoint,
        model_name=model.model_id,
        served_model_name=model.served_model_name,
        endpoint_types=",".join(settings.endpoint_types),
        custom_jinja_template=settings.custom_jinja_template,
        tool_call_parser=settings.dyn_tool_call_parser,
        reasoning_parser=settings.dyn_reasoning_parser,
        exclude_tools_when_tool_choice_none=settings.exclude_tools_when_tool_choice_none,
        enable_kv_routing=_routes_by_kv(mode),
        runtime=binding.runtime_config(
            settings.discovery_backend,
            settings.request_plane,
            settings.event_plane,
            response_plane=settings.response_plane,
        ),
        disaggregation_mode=binding.modes[mode],
        route_to_encoder=settings.route_to_encoder,
    )


def registration(model: DiscoveredModel, settings: WorkerSettings) -> Registration:
    """What Dynamo is told about the engine.

    Raises:
        IncompatibleEngine: The engine's KV facts make no sense (R6.8).
    """
    return model.registration(kv_routing=_routes_by_kv(settings.disaggregation_mode))


def check_registration(before: DiscoveredModel, now: DiscoveredModel, settings: WorkerSettings) -> DiscoveredModel:
    """Compare an engine that has replaced another one with what the worker's record says of that (R15.6).

    The binding cannot write a record anew with all that is in it. Front ends refuse prompts by the record's context
    length and find blocks by its block size, so these must be the same. Capacities only help routers and planners to
    guess, and vLLM measures its own anew at each start: the record goes on saying what it said.

    Returns:
        ``now``.

    Raises:
        IncompatibleEngine: The record would be wrong; says which field.
    """
    was, facts = registration(before, settings), registration(now, settings)
    for name in ("context_length", "kv_cache_block_size"):
        if getattr(was, name) != getattr(facts, name):
            reason = (
                f"the engine that came back has another {name} than this worker is registered with: "
                f"{getattr(facts, name)} instead of {getattr(was, name)}; start the worker anew"
            )
            raise IncompatibleEngine(reason)
    changes = {
        name: f"{getattr(was, name)} -> {getattr(facts, name)}"
        for name in ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
        if getattr(was, name) != getattr(facts, name)
    }
    if changes:
        effect = "this worker's record goes on saying what it said, until the worker starts anew"
        log.warning("engine_capacity_changed", effect=effect, **changes)
    return now


def engine_config(binding: Binding, settings: WorkerSettings, model: DiscoveredModel) -> Any:
    """What the engine is: Dynamo's ``EngineConfig``.

    Raises:
        IncompatibleEngine: The engine's KV facts make no sense (R6.8).
    """
    facts = registration(model, settings)
    return binding.engine_config(
        model=facts.model,
        served_model_name=facts.served_model_name,
        model_aliases=list(facts.aliases),
        runtime_data=dict(facts.runtime_data),
        llm=binding.llm_registration(
            context_length=facts.context_length,
            kv_cache_block_size=facts.kv_cache_block_size,
            total_kv_blocks=facts.total_kv_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            data_parallel_size=facts.data_parallel_size,
            data_parallel_start_rank=facts.data_parallel_start_rank,
            max_gpu_lora_count=facts.max_gpu_lora_count,
        ),
    )


def model_facts(model: DiscoveredModel, settings: WorkerSettings) -> ModelFacts:
    """What converting requests needs to know."""
    return ModelFacts(
        served_model_name=model.served_model_name,
        base_names=model.base_names,
        reasoning_parser=model.reasoning_parser,
        supports_lora=model.supports_lora,
        supports_multimodal=model.supports_multimodal,
        mode=settings.disaggregation_mode,
        caller_handoff=settings.caller_handoff,
    )


def _routes_by_kv(mode: DisaggregationMode) -> bool:
    return mode is not DisaggregationMode.ENCODE
