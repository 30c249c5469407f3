"""What a worker says of itself to a trainer (spec 6.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_sidecar.convert.fields import MAX_UINT32
from trio_sidecar.errors import IncompatibleEngine, InvalidConfig

if TYPE_CHECKING:
    from trio_sidecar.discovery import DiscoveredModel
    from trio_sidecar.endpoint import HttpEndpoint
    from trio_sidecar.wire import ParallelismInfo

WORLD_SIZE_FLAG = "--vllm-rl-world-size"


@attrs.frozen(slots=True, kw_only=True)
class RlWorkerMetadata:
    """What a trainer must know of a worker to transfer weights to it.

    Attributes:
        world_size: Processes of the whole deployment that take part, data parallelism included.
        admin_base_url: vLLM's own HTTP server, for what the gRPC contract lacks; None if nobody said where it is.
    """

    world_size: int
    admin_base_url: str | None = None


def worker_metadata(
    model: DiscoveredModel, *, configured_world_size: int | None, http_endpoint: HttpEndpoint | None
) -> RlWorkerMetadata:
    """The metadata of a worker before this engine (spec 6.4).

    Args:
        model: What discovery found.
        configured_world_size: For engines that do not report theirs; ignored if they do.
        http_endpoint: vLLM's HTTP server (R6.16).

    Raises:
        IncompatibleEngine: The engine reports no parallelism, or an impossible one.
        InvalidConfig: The engine does not report its world size, and the configured one is missing or impossible.
    """
    parallelism = model.parallelism
    if parallelism is None:
        reason = "RL needs the engine's parallelism, which it does not report"
        raise IncompatibleEngine(reason)
    for name, size in (
        ("tensor-parallel", parallelism.tensor_parallel_size),
        ("pipeline-parallel", parallelism.pipeline_parallel_size),
    ):
        if size == 0:
            reason = f"vLLM reports a {name} size of zero"
            raise IncompatibleEngine(reason)
    return RlWorkerMetadata(
        world_size=_world_size(parallelism, configured_world_size),
        admin_base_url=None if http_endpoint is None else str(http_endpoint),
    )


def _world_size(parallelism: ParallelismInfo, configured: int | None) -> int:
    engine = parallelism.tensor_parallel_size * parallelism.pipeline_parallel_size
    # The whole group counts, not the ranks behind this endpoint: the trainer's group spans all of them.
    group = parallelism.data_parallel_size
    if parallelism.world_size:
        total = parallelism.world_size * group
        if parallelism.world_size % engine or total > MAX_UINT32:
            reason = (
                f"vLLM reports an invalid engine world size of {parallelism.world_size}; expected a multiple of "
                f"TP * PP = {engine} that fits uint32 when multiplied by DP = {group}"
            )
            raise IncompatibleEngine(reason)
        return total
    if configured is None:
        raise InvalidConfig(WORLD_SIZE_FLAG, "is required, because the engine does not report its world size")
    if configured % (engine * group):
        raise InvalidConfig(WORLD_SIZE_FLAG, f"{configured} must be divisible by TP * PP * DP = {engine * group}")
    return configured
