"""What one mock engine is: its settings, resolved, and the answers of ``vllm.Control`` that follow from them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import attrs

from trio_sidecar import __version__
from trio_sidecar.config import DisaggregationMode, MockReply, MockSettings
from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR, MockTokenizer
from trio_sidecar.wire import ModelInfo, ParallelismInfo, RlCapabilities, ServerInfo

if TYPE_CHECKING:
    from typing import Self

__all__ = ["MockFacts"]

SHIPPED_MODEL_NAME = "mocker-model"
MAX_CANDIDATES = 20
"""Most candidates per position, as vLLM's own default."""

PROTO_VERSION = "0.6.0"
"""The release of the contract that the messages follow."""


@attrs.frozen(slots=True, kw_only=True)
class MockFacts:
    """What a mock engine needs to know to accept and answer a request.

    Attributes:
        model_id: Where a front end finds tokenizer and configuration: the shipped directory, or what ``--model`` names.
        tokenizer: The shipped one; None in token mode, which knows no text.
        ttft_secs: From admission to the first token, in seconds, speedup applied.
        itl_secs: Between tokens, in seconds, speedup applied; 0 floods.
        multimodal: Takes images and videos, and what an encode mock has made of them.
        lifetime: Tells this engine from others of the same settings, those before and after it, as vLLM's instance id
            does.
    """

    model_id: str
    served_model_name: str
    mode: DisaggregationMode
    tokenizer: MockTokenizer | None
    seed: int
    max_concurrent_requests: int
    ttft_secs: float
    itl_secs: float
    block_size: int
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    max_loras: int = 0
    rl_controls: bool = False
    multimodal: bool = False
    data_parallel_size: int = 1
    lifetime: str = attrs.field(factory=lambda: secrets.token_hex(4))

    @classmethod
    def resolve(cls, settings: MockSettings) -> Self:
        """Facts from settings; the default model name stands for the directory that ships in the package.

        Raises:
            OSError: The shipped model directory is incomplete.
        """
        shipped = settings.model == SHIPPED_MODEL_NAME
        return cls(
            model_id=str(MOCK_MODEL_DIR) if shipped else settings.model,
            served_model_name=settings.served_model_name or settings.model,
            mode=settings.disaggregation_mode,
            tokenizer=MockTokenizer.load() if settings.reply is MockReply.TEXT else None,
            seed=settings.seed,
            max_concurrent_requests=settings.max_concurrent_requests,
            ttft_secs=settings.ttft_ms / 1000.0 / settings.speedup_ratio,
            itl_secs=settings.itl_ms / 1000.0 / settings.speedup_ratio,
            block_size=settings.block_size,
            num_gpu_blocks=settings.num_gpu_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_prefix_caching=settings.enable_prefix_caching,
            max_loras=settings.max_loras,
            rl_controls=settings.rl_controls,
            multimodal=settings.multimodal or settings.disaggregation_mode is DisaggregationMode.ENCODE,
            data_parallel_size=settings.data_parallel_size,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the simulated KV cache."""
        return self.block_size * self.num_gpu_blocks

    def model_info(self) -> ModelInfo:
        """The answer to GetModelInfo (R16.3)."""
        return ModelInfo(
            model_id=self.model_id,
            served_model_name=self.served_model_name,
            supports_text_input=self.tokenizer is not None,
            supports_token_ids_input=True,
            supports_lora=self.max_loras > 0,
            supports_multimodal=self.multimodal,
        )

    def server_info(self) -> ServerInfo:
        """The answer to GetServerInfo (R16.3)."""
        return ServerInfo(
            engine_version=f"mock-{__version__}",
            api_version="vllm",
            instance_id=f"dynamo-vllm-mocker-{_MODE_NAMES[self.mode]}-{self.lifetime}",
            parallelism=ParallelismInfo(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=self.data_parallel_size,
                decode_context_parallel_size=1,
                world_size=1,
                data_parallel_size_local=self.data_parallel_size,
            ),
            max_model_len=self.max_model_len,
            kv_block_size=self.block_size,
            total_kv_blocks=self.num_gpu_blocks * self.data_parallel_size,
            max_running_requests=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens,
            max_loras=self.max_loras,
            rl_capabilities=RlCapabilities(
                weight_transfer_enabled=self.rl_controls,
                weight_transfer_backend="mock" if self.rl_controls else "",
                sleep_mode_enabled=self.rl_controls,
                draft_weight_updates_enabled=self.rl_controls,
            ),
            proto_version=PROTO_VERSION,
            effective_attention_block_size=self.block_size,
        )


_MODE_NAMES = {
    DisaggregationMode.AGGREGATED: "aggregated",
    DisaggregationMode.PREFILL: "prefill",
    DisaggregationMode.DECODE: "decode",
    DisaggregationMode.ENCODE: "encode",
}
