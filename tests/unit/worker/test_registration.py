"""What a worker registers as, for each role and each engine."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_dynamo import FakeDynamo
from trio_sidecar import wire
from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import IncompatibleEngine, InvalidConfig
from trio_sidecar.worker.registration import engine_config, model_facts, worker_config

Mode = DisaggregationMode


def new_settings(**changes: Any) -> WorkerSettings:
    """A worker's settings."""
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:1"))
    return WorkerSettings(transport=transport, **changes)


def new_model(*, model: dict[str, Any] | None = None, server: dict[str, Any] | None = None) -> DiscoveredModel:
    """The fixture of spec 0.3, without the reasoning parser that would clash with ours."""
    described = {
        "model_id": "model-source",
        "served_model_name": "served-model",
        "served_model_aliases": ["model-alias"],
        "supports_token_ids_input": True,
        "supports_lora": True,
        "tool_call_parser": "hermes",
    }
    limits = {
        "api_version": "vllm",
        "parallelism": wire.ParallelismInfo(data_parallel_size=2),
        "max_model_len": 8192,
        "kv_block_size": 16,
        "total_kv_blocks": 4096,
        "max_running_requests": 128,
        "max_batched_tokens": 2048,
        "max_loras": 4,
    }
    return DiscoveredModel.from_messages(
        wire.ModelInfo(**(described | (model or {}))),  # type: ignore[arg-type]
        wire.ServerInfo(**(limits | (server or {}))),  # type: ignore[arg-type]
    )


def registered(settings: WorkerSettings, model: DiscoveredModel) -> dict[str, Any]:
    """The arguments of Dynamo's WorkerConfig."""
    made: dict[str, Any] = worker_config(FakeDynamo().binding, settings, model).keywords
    return made


@pytest.mark.rule("R2.12", "R2.13", "R2.15")
def test_settings_are_passed_on() -> None:
    """Names, types, template, parsers and transports reach Dynamo as they were set."""
    settings = new_settings(
        namespace="ns",
        component="comp",
        endpoint="ep",
        endpoint_types=("chat", "embeddings"),
        custom_jinja_template="/template.jinja",
        dyn_tool_call_parser="qwen3_coder",
        dyn_reasoning_parser="qwen3",
        exclude_tools_when_tool_choice_none=False,
        route_to_encoder=True,
        discovery_backend="file",
        request_plane="tcp",
        event_plane="zmq",
        response_plane="quic",
    )
    made = registered(settings, new_model())
    runtime = made.pop("runtime")
    assert ("file", "tcp", "zmq") == runtime.positional
    assert {"response_plane": "quic"} == runtime.keywords
    assert {
        "namespace": "ns",
        "component": "comp",
        "endpoint": "ep",
        "model_name": "model-source",
        "served_model_name": "served-model",
        "endpoint_types": "chat,embeddings",
        "custom_jinja_template": "/template.jinja",
        "tool_call_parser": "qwen3_coder",
        "reasoning_parser": "qwen3",
        "exclude_tools_when_tool_choice_none": False,
        "enable_kv_routing": True,
        "disaggregation_mode": "AGGREGATED",
        "route_to_encoder": True,
    } == made


@pytest.mark.rule("2.1", "R2.12", "FR-075")
@pytest.mark.parametrize(
    ("mode", "component", "kv_routing"),
    [
        (Mode.AGGREGATED, "comp", True),
        (Mode.PREFILL, "prefill", True),
        (Mode.DECODE, "backend", True),
        (Mode.ENCODE, "encode", False),
    ],
)
def test_roles(mode: DisaggregationMode, component: str, kv_routing: bool) -> None:
    """Each role has its component, whatever is configured, and encode workers take no part in KV routing."""
    settings = new_settings(component="comp", disaggregation_mode=mode)
    made = registered(settings, new_model(model={"supports_multimodal": True}))
    assert (component, kv_routing, mode.name) == (
        made["component"],
        made["enable_kv_routing"],
        made["disaggregation_mode"],
    )


@pytest.mark.rule("R2.13")
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_route_to_encoder(mode: DisaggregationMode, wanted: bool) -> None:
    """Any role may declare that it needs an encode worker upstream, and none does so by itself."""
    settings = new_settings(disaggregation_mode=mode, route_to_encoder=wanted)
    assert wanted is registered(settings, new_model(model={"supports_multimodal": True}))["route_to_encoder"]


@pytest.mark.rule("R2.14")
def test_engine_parsers_are_not_advertised() -> None:
    """Without flags the worker advertises no parsers, whatever the engine parses itself."""
    made = registered(new_settings(), new_model(model={"reasoning_parser": "deepseek_r1"}))
    assert (None, None) == (made["tool_call_parser"], made["reasoning_parser"])


@pytest.mark.rule("R2.16", "R2.20")
@pytest.mark.parametrize("setting", ["dyn_tool_call_parser", "dyn_reasoning_parser"])
def test_two_parsers_clash(setting: str) -> None:
    """A parser of Dynamo's beside the engine's reasoning parser is refused with the way out; blanks are no parser."""
    settings = new_settings(**{setting: "qwen3"})
    with pytest.raises(InvalidConfig, match="--reasoning-parser none") as caught:
        registered(settings, new_model(model={"reasoning_parser": "deepseek_r1"}))
    assert f"--{setting.replace('_', '-')}" == caught.value.setting
    registered(settings, new_model(model={"reasoning_parser": "  "}))


@pytest.mark.rule("R2.18", "R2.19")
def test_encode_needs_media() -> None:
    """An encode worker before a text engine is refused, after the parsers were looked at."""
    settings = new_settings(disaggregation_mode=Mode.ENCODE)
    with pytest.raises(InvalidConfig, match=r"requires a multimodal engine.*served-model"):
        registered(settings, new_model())
    both = new_settings(disaggregation_mode=Mode.ENCODE, dyn_reasoning_parser="qwen3")
    with pytest.raises(InvalidConfig, match="--dyn-reasoning-parser"):
        registered(both, new_model(model={"reasoning_parser": "deepseek_r1"}))


def test_engine_config() -> None:
    """Identity, limits and capacities reach Dynamo (spec 6.2)."""
    made = engine_config(FakeDynamo().binding, new_settings(), new_model()).keywords
    llm = made.pop("llm").keywords
    assert {
        "model": "model-source",
        "served_model_name": "served-model",
        "model_aliases": ["model-alias"],
        "runtime_data": {"lora_requires_registration": True, "vllm_inference_v1_generate": True},
    } == made
    assert {
        "context_length": 8192,
        "kv_cache_block_size": 16,
        "total_kv_blocks": 2048,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "data_parallel_size": 2,
        "data_parallel_start_rank": 0,
        "max_gpu_lora_count": 4,
    } == llm


@pytest.mark.rule("R6.7", "R6.8")
def test_encode_publishes_no_kv_facts() -> None:
    """Encode workers publish no KV facts, and impossible ones do not matter there."""
    model = new_model(model={"supports_multimodal": True}, server={"effective_attention_block_size": 0})
    settings = new_settings(disaggregation_mode=Mode.ENCODE)
    llm = engine_config(FakeDynamo().binding, settings, model).keywords["llm"].keywords
    assert (None, None) == (llm["kv_cache_block_size"], llm["total_kv_blocks"])
    with pytest.raises(IncompatibleEngine):
        engine_config(FakeDynamo().binding, new_settings(), model)


@pytest.mark.rule("R6.9")
def test_model_facts() -> None:
    """Conversion learns every base name and what the model supports."""
    facts = model_facts(new_model(), new_settings())
    assert frozenset({"model-source", "served-model", "model-alias"}) == facts.base_names
    assert ("served-model", True, False, Mode.AGGREGATED) == (
        facts.served_model_name,
        facts.supports_lora,
        facts.supports_multimodal,
        facts.mode,
    )
    assert facts.caller_handoff


@pytest.mark.rule("FR-082")
def test_facts_from_the_settings() -> None:
    """Conversion learns the role, and whether callers may bring a handoff."""
    facts = model_facts(new_model(), new_settings(disaggregation_mode=Mode.PREFILL, caller_handoff=False))
    assert (Mode.PREFILL, False) == (facts.mode, facts.caller_handoff)
