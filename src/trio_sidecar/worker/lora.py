"""Adapters in Dynamo's discovery, and where their files come from; asyncio-flavoured.

The binding cannot copy the base model's record, so an adapter's is built from the same facts that the worker registered
with. Two things it cannot say there, and they stay unset: the engine's runtime data, for which it only takes strings,
and the capacity beside the other limits, which is in the adapter's own section only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.config import DisaggregationMode

if TYPE_CHECKING:
    from trio_sidecar.config import WorkerSettings
    from trio_sidecar.discovery import Registration
    from trio_sidecar.lora import Adapter
    from trio_sidecar.worker.binding import Binding

__all__ = ["DynamoPublisher", "aio_downloader"]

_WORKER_TYPES = {
    DisaggregationMode.AGGREGATED: "Aggregated",
    DisaggregationMode.PREFILL: "Prefill",
    DisaggregationMode.DECODE: "Decode",
    DisaggregationMode.ENCODE: "Encode",
}

_NEEDS = {
    DisaggregationMode.AGGREGATED: ((),),
    DisaggregationMode.PREFILL: (("Decode",),),
    DisaggregationMode.DECODE: (("Prefill",),),
    DisaggregationMode.ENCODE: (("Prefill", "Decode"), ("Aggregated",)),
}
"""Alternatives of peers without which a worker of that role is of no use, as Dynamo registers the base model."""

_MODEL_TYPES = {"chat": "Chat", "completions": "Completions"}


@attrs.frozen(eq=False, kw_only=True)
class DynamoPublisher:
    """Implements :class:`~trio_sidecar.lora.Publisher` for one worker.

    Attributes:
        binding: Dynamo.
        endpoint: The worker's, from the runtime.
        settings: What the worker serves as.
        facts: What it registered with.
    """

    binding: Binding
    endpoint: Any
    settings: WorkerSettings
    facts: Registration

    async def aio_publish(self, adapter: Adapter) -> None:
        """Write the adapter's record (R13.21)."""
        llm, facts, mode = self.binding.llm, self.facts, self.settings.disaggregation_mode
        base = facts.model or facts.served_model_name
        await llm.register_model(
            llm.ModelInput.Tokens,
            self._model_type(),
            self.endpoint,
            base,
            facts.served_model_name,
            worker_type=getattr(llm.WorkerType, _WORKER_TYPES[mode]),
            needs=self._needs(),
            kv_cache_block_size=facts.kv_cache_block_size,
            runtime_config=self._runtime_config(),
            custom_template_path=self.settings.custom_jinja_template,
            user_data={"lora_adapter": True, "lora_id": adapter.adapter_id},
            lora_name=adapter.name,
            base_model_path=base,
            max_gpu_lora_count=facts.max_gpu_lora_count,
            ignore_weights=True,
        )

    async def aio_unpublish(self, name: str) -> None:
        """Remove the adapter's record."""
        await self.binding.llm.unregister_model(self.endpoint, lora_name=name)

    def _model_type(self) -> Any:
        types = self.binding.llm.ModelType
        match self.settings.disaggregation_mode:
            case DisaggregationMode.PREFILL:
                return types.Prefill
            case DisaggregationMode.ENCODE:
                return types.Empty
        found = types.Empty
        for name in self.settings.endpoint_types:
            kind = getattr(types, _MODEL_TYPES.get(name, name.capitalize()), None)
            if kind is not None:
                found = kind if found is types.Empty else found | kind
        return found

    def _needs(self) -> list[list[Any]]:
        kinds = self.binding.llm.WorkerType
        mode = self.settings.disaggregation_mode
        extra = (kinds.Encode,) if self.settings.route_to_encoder and mode is not DisaggregationMode.ENCODE else ()
        needs = [[*(getattr(kinds, name) for name in names), *extra] for names in _NEEDS[mode]]
        return [names for names in needs if names]

    def _runtime_config(self) -> Any:
        config, facts = self.binding.llm.ModelRuntimeConfig(), self.facts
        # What is unknown, as the block count of an encode worker is, stays unset: the binding takes no None.
        for name in ("context_length", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(facts, name)) is not None:
                setattr(config, name, value)
        config.tool_call_parser = self.settings.dyn_tool_call_parser
        config.reasoning_parser = self.settings.dyn_reasoning_parser
        config.exclude_tools_when_tool_choice_none = self.settings.exclude_tools_when_tool_choice_none
        if facts.data_parallel_size is not None:
            config.data_parallel_size = facts.data_parallel_size
            config.data_parallel_start_rank = facts.data_parallel_start_rank or 0
        return config


def aio_downloader(binding: Binding) -> Any:
    """The function that fetches an adapter, unless it is here, and returns its directory."""

    async def aio_download(uri: str) -> str:
        directory: str = await binding.llm.LoRADownloader().download_if_needed(uri)
        return directory

    return aio_download
