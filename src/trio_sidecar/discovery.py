"""What the engine is: identity, parallelism, KV capacity, and what of it Dynamo is told (spec 5.9 on and 6).

Everything the worker tells Dynamo about the engine comes from the engine; nothing is assumed that it does not confirm
(FR-044). Trio-flavoured over any :class:`~trio_sidecar.engines.contract.Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
import betterproto2
import structlog
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.deadline import format_seconds
from trio_sidecar.errors import ConnectionTimeoutError, IncompatibleEngine, InvalidConfig
from trio_sidecar.health_wait import wait_until_serving
from trio_sidecar.wire import (
    GetModelInfoRequest,
    GetServerInfoRequest,
    ModelInfo,
    ParallelismInfo,
    RlCapabilities,
    ServerInfo,
)
from trio_sidecar.wire.codec import encode
from trio_sidecar.wire.methods import GET_MODEL_INFO, GET_SERVER_INFO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_sidecar.deadline import Deadline
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.wire.methods import Method

__all__ = ["DiscoveredModel", "IncompatibleEngine", "Registration", "discover", "wait_until_serving"]

Req = TypeVar("Req", bound=betterproto2.Message)
Resp = TypeVar("Resp", bound=betterproto2.Message)

API_VERSION = "vllm"
RANKS_FLAG = "--dp-ranks"
U32_MAX = 2**32 - 1

log = structlog.get_logger("trio_sidecar.discovery")


@attrs.frozen(slots=True, kw_only=True)
class Registration:
    """What the worker tells Dynamo about the engine (spec 6.2); None means unset.

    Attributes:
        model: Where the model comes from.
        served_model_name: The name clients use.
        aliases: Other names for it.
        context_length: Longest prompt plus output, in tokens.
        kv_cache_block_size: Tokens per KV block, as the router has to count them.
        total_kv_blocks: KV blocks of one data-parallel rank.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens of one engine step.
        max_gpu_lora_count: Adapters that are resident at once.
        data_parallel_size: Ranks that this worker stands for.
        data_parallel_start_rank: The first of them.
        runtime_data: Facts for Dynamo's front end and router.
    """

    model: str
    served_model_name: str
    aliases: tuple[str, ...]
    context_length: int | None
    kv_cache_block_size: int | None
    total_kv_blocks: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_gpu_lora_count: int | None
    data_parallel_size: int | None
    data_parallel_start_rank: int | None
    runtime_data: Mapping[str, object]


@attrs.frozen(kw_only=True)
class DiscoveredModel:
    """An engine's model as the engine describes it; made by :meth:`from_messages`, which refuses what cannot be served.

    Attributes:
        model_id: Where the model comes from.
        served_model_name: The name that requests carry.
        aliases: Other names of the base model.
        reasoning_parser: The engine's own; empty if it has none or only blanks (R2.20).
        tool_call_parser: The engine's own; empty if it has none.
        supports_lora: The model takes adapters, and there is room for at least one (R6.10).
        max_loras: Adapters that are resident at once.
        supports_multimodal: The model takes media.
        engine_version: For logs.
        instance_id: Changes with every life of the engine; may be empty.
        parallelism: As reported; None if the engine does not report it.
        local_ranks: Absolute data-parallel ranks behind this endpoint (R6.1 to R6.3).
        ranks: Those of them that this worker stands for; all, unless :meth:`standing_for` has narrowed it.
        rl_capabilities: As reported.
        server: Limits and sizes as reported.
    """

    model_id: str
    served_model_name: str
    aliases: tuple[str, ...]
    reasoning_parser: str
    tool_call_parser: str
    supports_lora: bool
    max_loras: int
    supports_multimodal: bool
    engine_version: str
    instance_id: str
    parallelism: ParallelismInfo | None
    local_ranks: range
    ranks: range
    rl_capabilities: RlCapabilities | None
    server: ServerInfo

    @classmethod
    def from_messages(cls, model: ModelInfo, server: ServerInfo) -> DiscoveredModel:
        """Combine the two descriptions.

        Raises:
            IncompatibleEngine: Not this API, no token-id input, no name, or impossible parallelism (spec 6.1).
        """
        if server.api_version != API_VERSION:
            reason = f"vLLM reports API version {server.api_version!r}; expected {API_VERSION!r}"
            raise IncompatibleEngine(reason)
        for field in ("model_id", "served_model_name"):
            if not getattr(model, field).strip():
                reason = f"vLLM reports an empty {field}"
                raise IncompatibleEngine(reason)
        if not model.supports_token_ids_input:
            reason = "the discovered model does not support token-ID input (supports_token_ids_input)"
            raise IncompatibleEngine(reason)
        local = local_ranks(server.parallelism)
        return cls(
            model_id=model.model_id,
            served_model_name=model.served_model_name,
            aliases=tuple(model.served_model_aliases),
            reasoning_parser=model.reasoning_parser.strip(),
            tool_call_parser=model.tool_call_parser.strip(),
            supports_lora=model.supports_lora and server.max_loras > 0,
            max_loras=server.max_loras,
            supports_multimodal=model.supports_multimodal,
            engine_version=server.engine_version,
            instance_id=server.instance_id,
            parallelism=server.parallelism,
            local_ranks=local,
            ranks=local,
            rl_capabilities=server.rl_capabilities,
            server=server,
        )

    @property
    def base_names(self) -> frozenset[str]:
        """Every name that means the base model (R6.9)."""
        return frozenset((self.model_id, self.served_model_name, *self.aliases))

    def standing_for(self, ranks: range | None) -> DiscoveredModel:
        """The same for a worker that stands for some of the ranks only; None changes nothing.

        Raises:
            InvalidConfig: A rank is not behind this endpoint.
        """
        if ranks is None:
            return self
        if not (self.local_ranks.start <= ranks.start and ranks.stop <= self.local_ranks.stop):
            reason = f"{_spelt(ranks)} is not behind this endpoint; its ranks are {_spelt(self.local_ranks)}"
            raise InvalidConfig(RANKS_FLAG, reason)
        return attrs.evolve(self, ranks=ranks)

    def registration(self, *, kv_routing: bool = True) -> Registration:
        """What to tell Dynamo.

        Args:
            kv_routing: Whether the router may use KV facts; encode workers have none (R6.7).

        Raises:
            IncompatibleEngine: An impossible attention block size (R6.8).
        """
        parallel = self.parallelism is not None
        return Registration(
            model=self.model_id,
            served_model_name=self.served_model_name,
            aliases=self.aliases,
            context_length=self.server.max_model_len or None,
            kv_cache_block_size=self._kv_block_size() if kv_routing else None,
            total_kv_blocks=self._kv_blocks_per_rank() if kv_routing else None,
            max_num_seqs=self.server.max_running_requests or None,
            max_num_batched_tokens=self.server.max_batched_tokens or None,
            max_gpu_lora_count=self.max_loras if self.supports_lora else None,
            data_parallel_size=len(self.ranks) if parallel else None,
            data_parallel_start_rank=self.ranks.start if parallel else None,
            runtime_data={"lora_requires_registration": True, "vllm_inference_v1_generate": True},
        )

    def check_same_engine(self, now: DiscoveredModel) -> None:
        """Refuse an engine that differs from this one in what the worker was registered for (R6.11 to R6.14).

        Raises:
            IncompatibleEngine: Identity, parallelism or RL capabilities differ; says which field.
        """
        for name in _IDENTITY:
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                reason = f"the engine's identity changed: {name} was {before!r}, is {after!r}"
                raise IncompatibleEngine(reason)
        if _bytes(self.parallelism) != _bytes(now.parallelism):
            reason = f"the engine's parallelism changed: was {self.parallelism!r}, is {now.parallelism!r}"
            raise IncompatibleEngine(reason)
        if _bytes(self.rl_capabilities) != _bytes(now.rl_capabilities):
            reason = f"the engine's RL capabilities changed: were {self.rl_capabilities!r}, are {now.rl_capabilities!r}"
            raise IncompatibleEngine(reason)

    def _kv_block_size(self) -> int | None:
        """Tokens per block (R6.8); the effective size wins, since it counts context parallelism as KV events do."""
        effective = self.server.effective_attention_block_size
        if effective is None:
            return self.server.kv_block_size or None
        if effective == 0:
            reason = "vLLM reports effective_attention_block_size 0; expected a nonzero size"
            raise IncompatibleEngine(reason)
        if effective > U32_MAX:
            reason = f"vLLM reports effective_attention_block_size {effective}; expected one that fits u32"
            raise IncompatibleEngine(reason)
        return effective

    def _kv_blocks_per_rank(self) -> int | None:
        """The engine reports the sum of its local ranks; Dynamo counts per rank (R6.6)."""
        total, ranks = self.server.total_kv_blocks, len(self.local_ranks)
        if total == 0:
            return None
        if total < ranks:
            log.warning("fewer_kv_blocks_than_ranks", total_kv_blocks=total, local_ranks=ranks, published_per_rank=1)
            return 1
        if total % ranks:
            log.warning(
                "kv_blocks_not_divisible", total_kv_blocks=total, local_ranks=ranks, published_per_rank=total // ranks
            )
        return total // ranks


_IDENTITY = (
    "model_id",
    "served_model_name",
    "aliases",
    "reasoning_parser",
    "tool_call_parser",
    "supports_lora",
    "max_loras",
    "supports_multimodal",
)


def _spelt(ranks: range) -> str:
    return f"{ranks.start}-{ranks.stop - 1}"


def _bytes(message: betterproto2.Message | None) -> bytes | None:
    return None if message is None else encode(message)


def local_ranks(parallelism: ParallelismInfo | None) -> range:
    """The absolute data-parallel ranks behind the endpoint (R6.1 to R6.3).

    Raises:
        IncompatibleEngine: An impossible combination.
    """
    if parallelism is None:
        return range(1)
    size, start, local = (
        parallelism.data_parallel_size,
        parallelism.data_parallel_rank,
        parallelism.data_parallel_size_local,
    )
    if size == 0:
        reason = "vLLM reports a data-parallel size of zero"
        raise IncompatibleEngine(reason)
    if local == 0:
        if start != 0:
            reason = f"vLLM reports data-parallel rank {start} without a local size (data_parallel_size_local)"
            raise IncompatibleEngine(reason)
        if size > 1:
            log.warning("local_ranks_assumed", data_parallel_size=size, reason="the engine reports no local size")
        return range(size)
    if start + local > size:
        reason = (
            f"vLLM reports an invalid local range of data-parallel ranks: {local} from rank {start} on, "
            f"in a group of {size}"
        )
        raise IncompatibleEngine(reason)
    return range(start, start + local)


async def discover(engine: Engine, deadline: Deadline) -> DiscoveredModel:
    """Ask the engine what it is (R5.9).

    Raises:
        ConnectionTimeoutError: The deadline passed; names the call.
        RpcError: A call was refused.
        IncompatibleEngine: The answers describe an engine that cannot be served.
    """
    model = await _call(engine, GET_MODEL_INFO, GetModelInfoRequest(), deadline)
    server = await _call(engine, GET_SERVER_INFO, GetServerInfoRequest(), deadline)
    return DiscoveredModel.from_messages(model, server)


async def _call(engine: Engine, method: Method[Req, Resp], request: Req, deadline: Deadline) -> Resp:
    started_at = trio.current_time()
    with deadline.scope():
        return await run_aio(engine.aio_call, method, request)
    elapsed = format_seconds(trio.current_time() - started_at)
    reason = f"{method.name}: no answer before the startup deadline ({elapsed} after the call)"
    raise ConnectionTimeoutError(reason)
