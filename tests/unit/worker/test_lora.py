"""Adapters in Dynamo's discovery, over a stand-in for the binding (spec 13.6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from support.fake_dynamo import FakeDynamo
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings
from trio_sidecar.discovery import Registration
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.lora import Adapter
from trio_sidecar.worker.lora import DynamoPublisher, aio_downloader

if TYPE_CHECKING:
    import asyncio

ENDPOINT = object()
ADAPTER = Adapter(name="adapter-a", adapter_id=7, path="/adapters/a")


@attrs.frozen
class Kind:
    """A member of one of Dynamo's enumerations; they can be joined."""

    name: str

    def __or__(self, other: Kind) -> Kind:
        """Both."""
        return Kind(f"{self.name}|{other.name}")


MODEL_INPUT = SimpleNamespace(Tokens="tokens")
MODEL_TYPE = SimpleNamespace(
    Chat=Kind("chat"), Completions=Kind("completions"), Prefill=Kind("prefill"), Empty=Kind("")
)
WORKER_TYPE = SimpleNamespace(Aggregated="agg", Prefill="prefill", Decode="decode", Encode="encode")


@attrs.define(eq=False)
class FakeLlm:
    """Notes what is registered."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = attrs.field(factory=list)
    downloads: list[str] = attrs.field(factory=list)
    ModelInput: Any = MODEL_INPUT
    ModelType: Any = MODEL_TYPE
    WorkerType: Any = WORKER_TYPE
    ModelRuntimeConfig: Any = SimpleNamespace

    async def register_model(self, *positional: Any, **keywords: Any) -> None:
        await aio_checkpoint()
        self.calls.append(("register", positional, keywords))

    async def unregister_model(self, *positional: Any, **keywords: Any) -> None:
        await aio_checkpoint()
        self.calls.append(("unregister", positional, keywords))

    def LoRADownloader(self) -> Any:  # noqa: N802 - Dynamo's name
        return SimpleNamespace(download_if_needed=self._aio_download)

    async def _aio_download(self, uri: str) -> str:
        await aio_checkpoint()
        self.downloads.append(uri)
        return "/cache/adapter"


def settings(**changes: Any) -> WorkerSettings:
    transport = TransportSettings(grpc_endpoint=GrpcEndpoint.parse("127.0.0.1:50051"))
    return WorkerSettings(transport=transport, **changes)


def facts(**changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "model": "model-source",
        "served_model_name": "served-model",
        "aliases": ("model-alias",),
        "context_length": 8192,
        "kv_cache_block_size": 16,
        "total_kv_blocks": 2048,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "max_gpu_lora_count": 4,
        "data_parallel_size": 4,
        "data_parallel_start_rank": 4,
        "runtime_data": {},
    }
    return Registration(**(fields | changes))


async def publish(worker: WorkerSettings, registered: Registration) -> tuple[tuple[Any, ...], dict[str, Any]]:
    llm = FakeLlm()
    binding = attrs.evolve(FakeDynamo().binding, llm=llm)
    publisher = DynamoPublisher(binding=binding, endpoint=ENDPOINT, settings=worker, facts=registered)
    await run_aio(publisher.aio_publish, ADAPTER)
    ((kind, positional, keywords),) = llm.calls
    assert "register" == kind
    return positional, keywords


@pytest.mark.rule("R13.21")
async def test_an_adapters_record_has_the_base_models_facts(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Everything that the worker registered with, except aliases, and what the adapter is."""
    positional, keywords = await publish(
        settings(
            dyn_tool_call_parser="hermes",
            dyn_reasoning_parser="qwen3",
            exclude_tools_when_tool_choice_none=False,
            custom_jinja_template="/template",
        ),
        facts(),
    )
    config = vars(keywords.pop("runtime_config"))
    assert ("tokens", Kind("chat|completions"), ENDPOINT, "model-source", "served-model") == positional
    assert {
        "worker_type": "agg",
        "needs": [],
        "kv_cache_block_size": 16,
        "custom_template_path": "/template",
        "user_data": {"lora_adapter": True, "lora_id": 7},
        "lora_name": "adapter-a",
        "base_model_path": "model-source",
        "max_gpu_lora_count": 4,
        "ignore_weights": True,
    } == keywords
    assert {
        "context_length": 8192,
        "total_kv_blocks": 2048,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "exclude_tools_when_tool_choice_none": False,
        "data_parallel_size": 4,
        "data_parallel_start_rank": 4,
    } == config


@pytest.mark.rule("R13.21")
async def test_what_is_unknown_stays_unset(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The binding takes no None, and a source without a name is the served model's."""
    positional, keywords = await publish(
        settings(), facts(model="", context_length=None, total_kv_blocks=None, data_parallel_size=None)
    )
    config = vars(keywords["runtime_config"])
    assert set() == {"context_length", "total_kv_blocks", "data_parallel_size", "data_parallel_start_rank"} & set(
        config
    )
    assert ("served-model", "served-model") == (positional[3], keywords["base_model_path"])


@pytest.mark.rule("R13.21")
@pytest.mark.parametrize(
    ("mode", "route_to_encoder", "model_type", "worker_type", "needs"),
    [
        (DisaggregationMode.AGGREGATED, False, "chat|completions", "agg", []),
        (DisaggregationMode.AGGREGATED, True, "chat|completions", "agg", [["encode"]]),
        (DisaggregationMode.PREFILL, False, "prefill", "prefill", [["decode"]]),
        (DisaggregationMode.PREFILL, True, "prefill", "prefill", [["decode", "encode"]]),
        (DisaggregationMode.DECODE, False, "chat|completions", "decode", [["prefill"]]),
        (DisaggregationMode.ENCODE, False, "", "encode", [["prefill", "decode"], ["agg"]]),
        (DisaggregationMode.ENCODE, True, "", "encode", [["prefill", "decode"], ["agg"]]),
    ],
)
async def test_roles_are_those_of_the_base_model(
    aio_loop: asyncio.AbstractEventLoop,
    mode: DisaggregationMode,
    route_to_encoder: bool,
    model_type: str,
    worker_type: str,
    needs: list[list[str]],
) -> None:
    """As the Rust sidecar registers the base model in each role."""
    positional, keywords = await publish(settings(disaggregation_mode=mode, route_to_encoder=route_to_encoder), facts())
    assert (Kind(model_type), worker_type, needs) == (positional[1], keywords["worker_type"], keywords["needs"])


@pytest.mark.parametrize(
    ("types", "joined"), [(("completions",), "completions"), (("completions", "chat", "poetry"), "completions|chat")]
)
async def test_endpoint_types_are_dynamos(
    aio_loop: asyncio.AbstractEventLoop, types: tuple[str, ...], joined: str
) -> None:
    """In the order given; what Dynamo does not know was refused when the base model was registered."""
    positional, _ = await publish(settings(endpoint_types=types), facts())
    assert Kind(joined) == positional[1]


@pytest.mark.rule("R13.23")
async def test_a_record_is_removed_by_name(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Of this worker's endpoint."""
    llm = FakeLlm()
    binding = attrs.evolve(FakeDynamo().binding, llm=llm)
    publisher = DynamoPublisher(binding=binding, endpoint=ENDPOINT, settings=settings(), facts=facts())
    await run_aio(publisher.aio_unpublish, "adapter-a")
    assert [("unregister", (ENDPOINT,), {"lora_name": "adapter-a"})] == llm.calls


@pytest.mark.rule("R13.4")
async def test_adapters_are_fetched_by_dynamo(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Its downloader knows all kinds of sources, and keeps what it has."""
    llm = FakeLlm()
    aio_download = aio_downloader(attrs.evolve(FakeDynamo().binding, llm=llm))
    assert "/cache/adapter" == await run_aio(aio_download, "hf://org/adapter")
    assert ["hf://org/adapter"] == llm.downloads


@pytest.mark.rule("R13.24")
async def test_each_worker_has_records_of_its_own(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Two workers before one discovery write under their own endpoints, and one that leaves takes only its own."""
    llm = FakeLlm()
    binding = attrs.evolve(FakeDynamo().binding, llm=llm)
    one = DynamoPublisher(binding=binding, endpoint="one", settings=settings(), facts=facts())
    two = attrs.evolve(one, endpoint="two")

    await run_aio(one.aio_publish, ADAPTER)
    await run_aio(two.aio_publish, ADAPTER)
    await run_aio(one.aio_unpublish, ADAPTER.name)

    assert ["one", "two"] == [positional[2] for kind, positional, _ in llm.calls if kind == "register"]
    assert ("unregister", ("one",), {"lora_name": "adapter-a"}) == llm.calls[-1]
