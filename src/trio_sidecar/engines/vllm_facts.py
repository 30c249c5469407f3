"""What one vLLM engine is, as far as requests and ``vllm.Control`` depend on it; no import of vLLM.

:func:`facts_of` reads vLLM's configuration by attribute name. What a release does not have is absent here, too, so
that 0.32 and 0.33 are told apart by what they can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.wire import ModelInfo, ParallelismInfo, RlCapabilities, ServerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["VllmFacts", "facts_of"]

API_VERSION = "vllm"
PROTO_VERSION = "0.6.0"
"""The release of the contract that our messages follow."""

U32_MAX = 2**32 - 1
NOT_FROM_MODEL = ("temperature",)
"""Defaults of the model that this API never uses (wire-and-server 2)."""


@attrs.frozen(slots=True, kw_only=True)
class VllmFacts:
    """A running engine's limits and names.

    Attributes:
        model_id: Path or repository that was loaded.
        served_names: Base names that ``model`` may say; the first is the official one.
        ranks: Absolute data-parallel ranks behind this engine.
        rank_offset: What to subtract from an absolute rank for vLLM, which counts from its own first one.
        max_model_len: Longest prompt plus output, in tokens.
        vocab_size: Width of the model's logits.
        tokenizer_size: Ids that the tokenizer knows; may be smaller or larger.
        max_logprobs: Most candidates per position; -1 is no limit.
        defaults: Sampling defaults of the model's generation config, in vLLM's names.
        supports_lora: Whether adapters can be loaded.
        sleep_mode: Whether Sleep and WakeUp are allowed.
        weight_transfer: The weight-transfer backend; empty if there is none.
        draft_updates: Whether a draft model's weights can be updated.
        unique_ids: Whether vLLM makes request ids unique by itself.
        server: The answer to GetServerInfo.
        model: The answer to GetModelInfo.
    """

    model_id: str
    served_names: tuple[str, ...]
    ranks: range
    rank_offset: int = 0
    max_model_len: int
    vocab_size: int
    tokenizer_size: int
    max_logprobs: int
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    supports_lora: bool = False
    sleep_mode: bool = False
    weight_transfer: str = ""
    draft_updates: bool = False
    unique_ids: bool = True
    server: ServerInfo = attrs.field(factory=ServerInfo, repr=False)
    model: ModelInfo = attrs.field(factory=ModelInfo, repr=False)

    @property
    def max_prompt_id(self) -> int:
        """Highest id that a prompt may hold."""
        return max(self.vocab_size, self.tokenizer_size) - 1


def facts_of(
    config: Any,
    *,
    version: str,
    served_names: Sequence[str],
    tokenizer_size: int,
    reasoning_parser: str = "",
    tool_call_parser: str = "",
    unique_ids: bool = True,
) -> VllmFacts:
    """Read a ``VllmConfig`` after the engine has started.

    Args:
        config: vLLM's configuration, with what the engine found out at its start.
        version: Of vLLM.
        served_names: The names to serve as; empty for the model's own.
        tokenizer_size: Ids that the tokenizer knows; 0 without a tokenizer.
        reasoning_parser: As reported to clients; parsing is not part of this API.
        tool_call_parser: The same.
        unique_ids: Whether vLLM makes request ids unique.
    """
    model, parallel = config.model_config, config.parallel_config
    names = tuple(served_names) or (str(model.model),)
    lora = getattr(config, "lora_config", None)
    transfer = getattr(config, "weight_transfer_config", None)
    backend = str(getattr(transfer, "backend", "") or "")
    sleep_mode = bool(getattr(model, "enable_sleep_mode", False))
    draft = bool(backend) and _has_draft_model(config)
    local_only = bool(getattr(parallel, "local_engines_only", False))
    size = int(parallel.data_parallel_size)
    start = int(getattr(parallel, "data_parallel_index", 0) or 0) if local_only else 0
    ranks = range(start, start + (int(parallel.data_parallel_size_local) if local_only else size))
    max_loras = int(lora.max_loras) if lora is not None else 0
    defaults = {name: value for name, value in model.get_diff_sampling_param().items() if name not in NOT_FROM_MODEL}
    return VllmFacts(
        model_id=str(model.model),
        served_names=names,
        ranks=ranks,
        rank_offset=start,
        max_model_len=int(model.max_model_len),
        vocab_size=int(model.get_vocab_size()),
        tokenizer_size=tokenizer_size,
        max_logprobs=int(model.max_logprobs),
        defaults=defaults,
        supports_lora=max_loras > 0,
        sleep_mode=sleep_mode,
        weight_transfer=backend,
        draft_updates=draft,
        unique_ids=unique_ids,
        server=_server_info(
            config,
            version,
            ranks,
            max_loras,
            RlCapabilities(
                weight_transfer_enabled=bool(backend),
                weight_transfer_backend=backend,
                sleep_mode_enabled=sleep_mode,
                draft_weight_updates_enabled=draft,
            ),
        ),
        model=_model_info(
            model, names, text=tokenizer_size > 0, lora=max_loras > 0, parsers=(reasoning_parser, tool_call_parser)
        ),
    )


def _model_info(model: Any, names: tuple[str, ...], *, text: bool, lora: bool, parsers: tuple[str, str]) -> ModelInfo:
    return ModelInfo(
        model_id=str(model.model),
        served_model_name=names[0],
        served_model_aliases=list(names[1:]),
        supports_text_input=text,
        supports_token_ids_input=True,
        supports_lora=lora,
        # Media are refused (see sampling_checks.py), so that nobody sends us any.
        supports_multimodal=False,
        reasoning_parser=parsers[0],
        tool_call_parser=parsers[1],
    )


def _server_info(config: Any, version: str, ranks: range, max_loras: int, rl: RlCapabilities) -> ServerInfo:
    parallel, cache, scheduler = config.parallel_config, config.cache_config, config.scheduler_config
    attention_block = getattr(cache, "effective_attention_block_size", None)
    return ServerInfo(
        engine_version=version,
        api_version=API_VERSION,
        instance_id=str(getattr(config, "instance_id", "") or ""),
        parallelism=ParallelismInfo(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_rank=ranks.start,
            decode_context_parallel_size=int(getattr(parallel, "decode_context_parallel_size", 1) or 1),
            world_size=int(parallel.world_size),
            data_parallel_size_local=len(ranks),
        ),
        max_model_len=int(config.model_config.max_model_len),
        kv_block_size=min(int(cache.block_size or 0), U32_MAX),
        total_kv_blocks=int(cache.num_gpu_blocks or 0),
        max_running_requests=int(scheduler.max_num_seqs),
        max_batched_tokens=int(scheduler.max_num_batched_tokens),
        max_loras=max_loras,
        rl_capabilities=rl,
        proto_version=PROTO_VERSION,
        effective_attention_block_size=None if attention_block is None else int(attention_block),
    )


def _has_draft_model(config: Any) -> bool:
    speculative = getattr(config, "speculative_config", None)
    return speculative is not None and getattr(speculative, "draft_model_config", None) is not None
